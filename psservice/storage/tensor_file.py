"""Safetensors files, written piece by piece: no tensor is in memory whole for that."""

import json
import math
from collections.abc import Mapping
from typing import IO, Any

import torch

from psservice.model.copies import TensorCopy

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
_PIECE_ELEMENTS = 1 << 20
_ALIGNMENT = 8


def write(file: IO[bytes], tensors: Mapping[str, TensorCopy]) -> None:
    """Write a file; each tensor is read in ascending pieces.

    Raises ``OSError``, also if a tensor's data type has no name in the format.
    """
    header: dict[str, Any] = {}
    position = 0
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))  # each is aligned then
    for name, tensor in ordered:
        if tensor.dtype not in _NAMES:
            raise OSError(f"{name} is of {tensor.dtype}, which a safetensors file cannot have")
        end = position + math.prod(tensor.shape) * tensor.dtype.itemsize
        place = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": (position, end)}
        header[name], position = place, end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        size = math.prod(tensor.shape)
        for start in range(0, size, _PIECE_ELEMENTS):
            end = min(size, start + _PIECE_ELEMENTS)
            file.write(tensor.read(start, end).cpu().view(torch.uint8).numpy().data)
            tensor.release(end)

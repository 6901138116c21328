"""A model's buffers as one byte string: every tensor in its own dtype, end to end in layout order, little-endian."""

from collections.abc import Iterable, Sequence

import torch

from pscore.model.layout import TensorSpec


def is_exchanged(spec: TensorSpec) -> bool:
    """Tell whether workers exchange this buffer: floating point (averaged) and integer scalars (counters).

    Anything else (index tables, masks) is a constant of the architecture and travels once, with the upload.
    """
    return spec.dtype.is_floating_point or (spec.shape == () and spec.dtype != torch.bool)


def packed_bytes(specs: Iterable[TensorSpec]) -> int:
    """Bytes that :func:`pack` returns for tensors of these specs."""
    return sum(spec.nbytes for spec in specs)


def pack(tensors: Iterable[torch.Tensor]) -> bytes:
    """Write tensors end to end."""
    return b"".join(
        tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors
    )


def unpack(data: bytes, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    """Read tensors of these specs back, on the host; ``data`` must have exactly :func:`packed_bytes` bytes."""
    if len(data) != packed_bytes(specs):
        raise ValueError(f"{len(data)} bytes for buffers of {packed_bytes(specs)}")
    tensors, position = [], 0
    for spec in specs:
        raw = bytearray(data[position : position + spec.nbytes])
        flat = (
            torch.frombuffer(raw, dtype=spec.dtype) if spec.nbytes else torch.empty(0, dtype=spec.dtype, device="cpu")
        )
        tensors.append(flat.reshape(spec.shape))
        position += spec.nbytes
    return tensors

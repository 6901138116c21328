"""Floating-point numbers, little-endian: binary32, binary16 and bfloat16, rounded to nearest even."""

import numpy as np
import torch
from numpy.typing import NDArray

from pscore.wire.codecs.values.format import ValueFormat, Values

_SERIAL = 1 << 14  # elements that torch converts in the calling thread; for more it would start threads of its own


def _write_fp32(values: Values) -> bytes:
    return values.astype("<f4", copy=False).tobytes()


def _read_fp32(data: bytes, count: int) -> Values:
    # A copy: protobuf's bytes are read-only, and torch wants memory that it may write.
    return np.frombuffer(data, "<f4").astype(np.float32)


def _narrow(values: Values, dtype: torch.dtype) -> bytes:
    """Round to a 16-bit type; magnitudes beyond its largest become that one."""
    largest = torch.finfo(dtype).max
    parts = (part.clamp(-largest, largest).to(dtype) for part in torch.split(torch.from_numpy(values), _SERIAL))
    return b"".join(part.view(torch.uint16).numpy().astype("<u2", copy=False).tobytes() for part in parts)


def _write_fp16(values: Values) -> bytes:
    return _narrow(values, torch.float16)


def _read_fp16(data: bytes, count: int) -> Values:
    return np.frombuffer(data, "<f2").astype(np.float32)


def _write_bf16(values: Values) -> bytes:
    return _narrow(values, torch.bfloat16)


def _read_bf16(data: bytes, count: int) -> Values:
    return widen_bf16(np.frombuffer(data, "<u2"))


def widen_bf16(bits: NDArray[np.uint16]) -> Values:
    """Return the fp32 values of bfloat16 bit patterns, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


FP32 = ValueFormat("fp32", 32, True, _write_fp32, _read_fp32)
FP16 = ValueFormat("fp16", 16, False, _write_fp16, _read_fp16)
BF16 = ValueFormat("bf16", 16, False, _write_bf16, _read_bf16)

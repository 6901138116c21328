"""Floating-point numbers, little-endian: binary32, binary16 and bfloat16, rounded to nearest even."""

import numpy as np
from numpy.typing import NDArray

from pscore.wire.codecs.limits import is_compiled
from pscore.wire.codecs.values import loops
from pscore.wire.codecs.values.format import ValueFormat, Values

_LARGEST_FP16 = np.float32(65504)
_LARGEST_BF16 = np.array(0x7F7F0000, np.uint32).view(np.float32)[()]


def _write_fp32(values: Values) -> bytes:
    return values.astype("<f4", copy=False).tobytes()


def _read_fp32(data: bytes, count: int) -> Values:
    # A copy: protobuf's bytes are read-only, and torch wants memory that it may write.
    return np.frombuffer(data, "<f4").astype(np.float32)


def _write_fp16(values: Values) -> bytes:
    if is_compiled(values.size):  # ten times faster than numpy
        halves = np.empty(values.size, np.uint16)
        loops.write_half(values.view(np.uint32), halves)
        return halves.astype("<u2").tobytes()
    return np.clip(values, -_LARGEST_FP16, _LARGEST_FP16).astype("<f2").tobytes()


def _read_fp16(data: bytes, count: int) -> Values:
    return np.frombuffer(data, "<f2").astype(np.float32)


def _write_bf16(values: Values) -> bytes:
    bits = np.clip(values, -_LARGEST_BF16, _LARGEST_BF16).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    if np.isnan(values).any():  # rounding could carry a NaN into a zero; let it stay one, and be refused
        rounded[np.isnan(values)] = 0x7FC00000
    return (rounded >> np.uint32(16)).astype("<u2").tobytes()


def _read_bf16(data: bytes, count: int) -> Values:
    return widen_bf16(np.frombuffer(data, "<u2"))


def widen_bf16(bits: NDArray[np.uint16]) -> Values:
    """Return the fp32 values of bfloat16 bit patterns, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


FP32 = ValueFormat("fp32", 32, True, _write_fp32, _read_fp32)
FP16 = ValueFormat("fp16", 16, False, _write_fp16, _read_fp16)
BF16 = ValueFormat("bf16", 16, False, _write_bf16, _read_bf16)

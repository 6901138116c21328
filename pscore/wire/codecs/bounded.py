"""Magnitudes as levels between the bounds of their block of 512 values: 8 or 4 bits a value, with the sign.

The bounds come first: least and largest magnitude of each block, fp32; then the codes. A block with a zero has 0 for
its lower bound, so zeros stay zeros.

INT8 has a byte a value: the sign in the highest bit, and 128 evenly spaced levels.

INT4 has two values a byte, the first in the low bits (an odd one leaves four zero bits): the sign in the highest bit,
and 8 levels whose fourth roots are evenly spaced. Such levels are nearly geometric, which suits what top-k selection
leaves over (two thirds of the squared error of even spacing on Laplace tails, a third on Student's t3). Unlike
geometric ones they reach down to zero and need square roots only, which every machine rounds alike. The smallest values
beside a zero may become zeros too.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pscore.wire.codecs import bounded_loops as loops
from pscore.wire.codecs.format import ValueFormat, Values, is_compiled
from pscore.wire.errors import ErrorCode, Rejected

BLOCK = 512
"""Values that share bounds: 64 bits a block are 1/8 bit a value."""

_STEPS8, _STEPS4 = 127, 7
_RATIOS8, _RATIOS4 = np.arange(_STEPS8 + 1) / _STEPS8, np.arange(_STEPS4 + 1) / _STEPS4

Real = TypeVar("Real", np.float32, np.float64)


def _bounds_of(values: Values) -> Values:
    bounds = np.empty((-(-values.size // BLOCK), 2), np.float32)
    if is_compiled(values.size):
        loops.find_bounds(values.view(np.int32), BLOCK, bounds.view(np.int32))
    elif values.size:
        starts, magnitudes = np.arange(0, values.size, BLOCK), np.abs(values)
        bounds[:, 0], bounds[:, 1] = np.minimum.reduceat(magnitudes, starts), np.maximum.reduceat(magnitudes, starts)
    _check_finite(bounds)
    return bounds


def _read_bounds(data: bytes, count: int) -> Values:
    bounds = np.frombuffer(data, "<f4", 2 * -(-count // BLOCK)).astype(np.float32).reshape(-1, 2)
    _check_finite(bounds)
    if np.signbit(bounds).any() or (bounds[:, 0] > bounds[:, 1]).any():
        raise Rejected(ErrorCode.BAD_CHUNK, "bounds of magnitudes are negative or in the wrong order")
    return bounds


def _check_finite(bounds: Values) -> None:
    if not np.isfinite(bounds).all():
        raise Rejected(ErrorCode.NON_FINITE, "a bound of magnitudes is not finite")


def _codes(values: Values, bounds: Values, ends: NDArray[Real], steps: int, rooted: bool) -> NDArray[np.uint8]:
    """Return the nearest level of each value, from 0 to ``steps``, and the sign in the bit above.

    Levels are evenly spaced between the ``ends``: the bounds or, where ``rooted``, their fourth roots. The dtype of the
    ends is that of the arithmetic.
    """
    low, spread = np.ascontiguousarray(ends[:, 0]), ends[:, 1] - ends[:, 0]
    scale = np.divide(steps, spread, out=np.zeros_like(low), where=spread > 0)
    codes = np.empty(values.size, np.uint8)
    if is_compiled(values.size):
        loops.write_levels(values, bounds, low, scale, low.dtype.type(steps), rooted or None, BLOCK, codes)
        return codes
    magnitudes = np.abs(values)
    points = _fourth_root(magnitudes) if rooted else magnitudes.astype(np.float64)
    levels = np.clip(np.rint((points - _by_value(low, values.size)) * _by_value(scale, values.size)), 0, steps)
    levels[magnitudes >= _by_value(bounds[:, 1], values.size)] = steps
    codes[:] = levels.astype(np.uint8) | np.signbit(values).astype(np.uint8) * np.uint8(steps + 1)
    return codes


def _fourth_root(magnitudes: NDArray[Real]) -> NDArray[Real]:
    return np.sqrt(np.sqrt(magnitudes))


def _by_value(of_blocks: NDArray[Real], count: int) -> NDArray[Real]:
    """Repeat a number of each block for each of its values."""
    return of_blocks.repeat(BLOCK)[:count]


def _write8(values: Values) -> bytes:
    bounds = _bounds_of(values)
    codes = _codes(values, bounds, bounds.astype(np.float64), _STEPS8, rooted=False)
    return bounds.astype("<f4").tobytes() + codes.tobytes()


def _read8(data: bytes, count: int) -> Values:
    bounds = _read_bounds(data, count).astype(np.float64)
    codes = np.frombuffer(data, np.uint8, count, len(data) - count)
    low, spread = np.ascontiguousarray(bounds[:, 0]), bounds[:, 1] - bounds[:, 0]
    if is_compiled(count):
        values = np.empty(count, np.float32)
        loops.read_even(low, spread, _RATIOS8, codes, BLOCK, values)
        return values
    magnitudes: Values = (_by_value(low, count) + _by_value(spread, count) * _RATIOS8[codes & 127]).astype(np.float32)
    magnitudes[codes > 127] *= -1
    return magnitudes


def _write4(values: Values) -> bytes:
    bounds = _bounds_of(values)
    # In fp32, which is faster: the reader needs the exact levels, the writer only the nearest one.
    codes = _codes(values, bounds, _fourth_root(bounds), _STEPS4, rooted=True)
    packed = codes[::2].copy()
    packed[: values.size // 2] |= codes[1::2] << 4
    return bounds.astype("<f4").tobytes() + packed.tobytes()


def _read4(data: bytes, count: int) -> Values:
    bounds = _read_bounds(data, count)
    packed = np.frombuffer(data, np.uint8, -1, bounds.nbytes)
    if count % 2 and packed[-1] > 15:
        raise Rejected(ErrorCode.BAD_CHUNK, "bits behind the last value are not zero")
    table = _levels4(bounds)
    values = np.empty(count, np.float32)
    if is_compiled(count):
        loops.read_packed(table, packed, BLOCK, values)
        return values
    blocks = np.arange(len(table)).repeat(BLOCK)[:count]
    values[::2] = table[blocks[::2], packed & 15]
    values[1::2] = table[blocks[1::2], packed[: count // 2] >> 4]
    return values


def _levels4(bounds: Values) -> Values:
    """Return fp32 ``[blocks, 16]``: the value of each code of a block."""
    roots = _fourth_root(bounds.astype(np.float64))
    roots = roots[:, :1] + (roots[:, 1:] - roots[:, :1]) * _RATIOS4
    squares = roots * roots
    magnitudes = np.minimum(squares * squares, bounds[:, 1:]).astype(np.float32)
    return np.concatenate([magnitudes, -magnitudes], axis=1)


INT8 = ValueFormat("int8", 8, False, _write8, _read8, BLOCK, bound_bytes=8)
INT4 = ValueFormat("int4", 4, False, _write4, _read4, BLOCK, bound_bytes=8)

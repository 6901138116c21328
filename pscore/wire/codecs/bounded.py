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

from pscore.wire.codecs import value_loops as loops
from pscore.wire.codecs.format import ValueFormat, Values, is_compiled
from pscore.wire.codecs.value_loops import BLOCK
from pscore.wire.errors import ErrorCode, Rejected

Real = TypeVar("Real", np.float32, np.float64)

_RATIOS8, _RATIOS4 = np.arange(128) / 127, np.arange(8) / 7


def _write8(values: Values) -> tuple[bytes, Values]:
    bounds, codes = np.empty((-(-values.size // BLOCK), 2), np.float32), np.empty(values.size, np.uint8)
    if is_compiled(values.size):
        decoded = np.empty_like(values)
        _require_finite(loops.write8(values, bounds, codes, decoded))
        return bounds.tobytes() + codes.tobytes(), decoded
    magnitudes = _find_bounds(values, bounds)
    low, spread = bounds[:, 0].astype(np.float64), bounds[:, 1].astype(np.float64) - bounds[:, 0]
    scale = np.divide(127, spread, out=np.zeros_like(low), where=spread > 0)
    levels = np.clip(np.rint((magnitudes - _by_value(low, values)) * _by_value(scale, values)), 0, 127)
    levels[magnitudes >= _by_value(bounds[:, 1], values)] = 127
    codes[:] = levels.astype(np.uint8) | np.signbit(values).astype(np.uint8) << 7
    return bounds.tobytes() + codes.tobytes(), _values8(bounds, codes)


def _read8(data: bytes, count: int) -> Values:
    octets = np.frombuffer(data, np.uint8)
    if is_compiled(count):
        values = np.empty(count, np.float32)
        _require_bounds(loops.read8(octets, values))
        return values
    bounds, codes = _split(octets, count)
    return _values8(bounds, codes)


def _values8(bounds: Values, codes: NDArray[np.uint8]) -> Values:
    low, spread = bounds[:, 0].astype(np.float64), bounds[:, 1].astype(np.float64) - bounds[:, 0]
    values: Values = (_by_value(low, codes) + _by_value(spread, codes) * _RATIOS8[codes & 127]).astype(np.float32)
    values[codes > 127] *= -1
    return values


def _write4(values: Values) -> tuple[bytes, Values]:
    bounds, packed = np.empty((-(-values.size // BLOCK), 2), np.float32), np.empty(-(-values.size // 2), np.uint8)
    if is_compiled(values.size):
        decoded = np.empty_like(values)
        _require_finite(loops.write4(values, bounds, packed, decoded))
        return bounds.tobytes() + packed.tobytes(), decoded
    magnitudes, levels = _find_bounds(values, bounds), _levels4(bounds)
    cuts = ((levels[:, :7].astype(np.float64) + levels[:, 1:8]) / 2).astype(np.float32)
    cuts = np.where(cuts < levels[:, 1:8], cuts, levels[:, :7])
    codes = (magnitudes[:, None] > _by_value(cuts, values)).sum(1, dtype=np.uint8)
    codes |= np.signbit(values).astype(np.uint8) << 3
    packed[:] = codes[::2]
    packed[: values.size // 2] |= codes[1::2] << 4
    return bounds.tobytes() + packed.tobytes(), _by_value(levels, values)[np.arange(values.size), codes]


def _read4(data: bytes, count: int) -> Values:
    octets, values = np.frombuffer(data, np.uint8), np.empty(count, np.float32)
    if is_compiled(count):
        _require_bounds(loops.read4(octets, values))
    else:
        bounds, packed = _split(octets, count)
        levels = _by_value(_levels4(bounds), values)
        values[::2] = levels[np.arange(0, count, 2), packed & 15]
        values[1::2] = levels[np.arange(1, count, 2), packed[: count // 2] >> 4]
    if count % 2 and octets[-1] > 15:
        raise Rejected(ErrorCode.BAD_CHUNK, "bits behind the last value are not zero")
    return values


def _levels4(bounds: Values) -> Values:
    """Return fp32 ``[blocks, 16]``: the value of each code of a block."""
    roots = np.sqrt(np.sqrt(bounds.astype(np.float64)))
    roots = roots[:, :1] + (roots[:, 1:] - roots[:, :1]) * _RATIOS4
    squares = roots * roots
    magnitudes = np.minimum(squares * squares, bounds[:, 1:]).astype(np.float32)
    return np.concatenate([magnitudes, -magnitudes], axis=1)


def _find_bounds(values: Values, bounds: Values) -> Values:
    """Fill in the bounds of each block; return the magnitudes."""
    starts, magnitudes = np.arange(0, values.size, BLOCK), np.abs(values)
    if values.size:
        bounds[:, 0], bounds[:, 1] = np.minimum.reduceat(magnitudes, starts), np.maximum.reduceat(magnitudes, starts)
    _require_finite(bool(np.isfinite(bounds).all()))
    return magnitudes


def _split(octets: NDArray[np.uint8], count: int) -> tuple[Values, NDArray[np.uint8]]:
    """Return the bounds, which are checked, and the codes."""
    end = 8 * -(-count // BLOCK)
    bounds = octets[:end].view(np.float32).reshape(-1, 2)
    _require_finite(bool(np.isfinite(bounds).all()))
    if np.signbit(bounds).any() or (bounds[:, 0] > bounds[:, 1]).any():
        _require_bounds(loops.WRONG_ORDER)
    return bounds, octets[end:]


def _require_bounds(wrong: int) -> None:
    _require_finite(wrong != loops.NOT_FINITE)
    if wrong:
        raise Rejected(ErrorCode.BAD_CHUNK, "bounds of magnitudes are negative or in the wrong order")


def _require_finite(finite: bool) -> None:
    if not finite:
        raise Rejected(ErrorCode.NON_FINITE, "a bound of magnitudes is not finite")


def _by_value(of_blocks: NDArray[Real], values: NDArray[np.generic]) -> NDArray[Real]:
    """Repeat what a block has for each of its values."""
    return of_blocks.repeat(BLOCK, axis=0)[: values.size]


INT8 = ValueFormat("int8", 8, False, _write8, _read8, BLOCK, bound_bytes=8)
INT4 = ValueFormat("int4", 4, False, _write4, _read4, BLOCK, bound_bytes=8)

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

import numpy as np

from pscore.wire.codecs import value_loops as loops
from pscore.wire.codecs.format import ValueFormat, Values
from pscore.wire.codecs.value_loops import BLOCK
from pscore.wire.errors import ErrorCode, Rejected


def _write8(values: Values) -> tuple[bytes, Values]:
    bounds, codes = np.empty((-(-values.size // BLOCK), 2), np.float32), np.empty(values.size, np.uint8)
    decoded = np.empty_like(values)
    _require_finite(loops.write8.on(values.size)(values, bounds, codes, decoded))
    return bounds.tobytes() + codes.tobytes(), decoded


def _read8(data: bytes, count: int) -> Values:
    values = np.empty(count, np.float32)
    _require_bounds(loops.read8.on(count)(np.frombuffer(data, np.uint8), values))
    return values


def _write4(values: Values) -> tuple[bytes, Values]:
    bounds, packed = np.empty((-(-values.size // BLOCK), 2), np.float32), np.empty(-(-values.size // 2), np.uint8)
    decoded = np.empty_like(values)
    _require_finite(loops.write4.on(values.size)(values, bounds, packed, decoded))
    return bounds.tobytes() + packed.tobytes(), decoded


def _read4(data: bytes, count: int) -> Values:
    octets, values = np.frombuffer(data, np.uint8), np.empty(count, np.float32)
    _require_bounds(loops.read4.on(count)(octets, values))
    if count % 2 and octets[-1] > 15:
        raise Rejected(ErrorCode.BAD_CHUNK, "bits behind the last value are not zero")
    return values


def _require_bounds(wrong: int) -> None:
    _require_finite(wrong != loops.NOT_FINITE)
    if wrong:
        raise Rejected(ErrorCode.BAD_CHUNK, "bounds of magnitudes are negative or in the wrong order")


def _require_finite(finite: bool) -> None:
    if not finite:
        raise Rejected(ErrorCode.NON_FINITE, "a bound of magnitudes is not finite")


INT8 = ValueFormat("int8", 8, False, _write8, _read8, BLOCK, bound_bytes=8)
INT4 = ValueFormat("int4", 4, False, _write4, _read4, BLOCK, bound_bytes=8)

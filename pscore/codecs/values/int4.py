"""Four bits a value: sign (the highest bit) and 8 magnitudes between the bounds of a block, two values a byte.

The fourth roots of the levels are evenly spaced: the levels are nearly geometric, which suits what top-k selection
leaves over (two thirds of the squared error of even spacing on Laplace tails, a third on Student's t3), and unlike
geometric ones they reach down to zero and need square roots only, which every machine rounds alike. A block that holds
a zero has 0 for its lower bound, so zeros come back as zeros, and so may the smallest values beside them.

The bounds come first; then the values, the first of two in the low bits. An odd one leaves four zero bits.
"""

import numpy as np

from pscore.codecs.values.bounds import (
    BLOCK,
    BOUND_BYTES,
    bounds_of,
    codes_of,
    fourth_root,
    levels,
    look_up,
    read_bounds,
)
from pscore.codecs.values.format import ValueFormat, Values
from pscore.reasons import Reason, Refusal

_STEPS = 7


def _write(values: Values) -> bytes:
    bounds = bounds_of(np.abs(values))
    codes = np.zeros(values.size + values.size % 2, np.uint8)
    codes[: values.size] = codes_of(values, bounds, _STEPS, sign=8, rooted=True)
    return bounds.astype("<f4").tobytes() + (codes[::2] | codes[1::2] << 4).tobytes()


def _read(data: bytes, count: int) -> Values:
    bounds = read_bounds(data, count)
    packed = np.frombuffer(data, np.uint8, -1, bounds.nbytes)
    if count % 2 and packed[-1] > 15:
        raise Refusal(Reason.BAD_CHUNK, "bits behind the last value are not zero")
    codes = np.empty(2 * packed.size, np.uint8)
    codes[::2], codes[1::2] = packed & 15, packed >> 4
    roots = levels(fourth_root(bounds), _STEPS)
    squares = roots * roots
    return look_up(np.minimum(squares * squares, bounds[:, 1:]), codes[:count], count)


INT4 = ValueFormat("int4", 4, False, _write, _read, BLOCK, BOUND_BYTES)

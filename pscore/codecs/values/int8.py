"""Eight bits a value: sign (the highest bit) and 128 magnitudes, evenly spaced between the bounds of a block.

The bounds come first, then a byte a value. A block that holds a zero has 0 for its lower bound, so zeros come back as
zeros.
"""

import numpy as np

from pscore.codecs.values.bounds import BLOCK, BOUND_BYTES, bounds_of, codes_of, levels, look_up, read_bounds
from pscore.codecs.values.format import ValueFormat, Values

_STEPS = 127


def _write(values: Values) -> bytes:
    bounds = bounds_of(np.abs(values))
    return bounds.astype("<f4").tobytes() + codes_of(values, bounds, _STEPS, sign=128, rooted=False).tobytes()


def _read(data: bytes, count: int) -> Values:
    bounds = read_bounds(data, count)
    codes = np.frombuffer(data, np.uint8, count, bounds.nbytes)
    return look_up(levels(bounds.astype(np.float64), _STEPS), codes, count)


INT8 = ValueFormat("int8", 8, False, _write, _read, BLOCK, BOUND_BYTES)

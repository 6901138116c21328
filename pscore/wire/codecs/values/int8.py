"""Eight bits a value: sign (the highest bit) and 128 magnitudes, evenly spaced between the bounds of a block.

The bounds come first, then a byte a value. A block that holds a zero has 0 for its lower bound, so zeros come back as
zeros.
"""

import numpy as np

from pscore.wire.codecs.values.bounds import (
    BLOCK,
    BOUND_BYTES,
    bounds_of,
    by_value,
    loops_for,
    nearest,
    read_bounds,
    spacing,
)
from pscore.wire.codecs.values.format import ValueFormat, Values

_STEPS = 127
_RATIOS = np.arange(_STEPS + 1) / _STEPS


def _write(values: Values) -> bytes:
    bounds = bounds_of(values)
    low, scale = spacing(bounds.astype(np.float64), _STEPS)
    loops = loops_for(values.size)
    if loops is not None:
        codes = np.empty(values.size, np.uint8)
        loops.write_even(values, bounds, low, scale, float(_STEPS), BLOCK, codes)
    else:
        places = (np.abs(values).astype(np.float64) - by_value(low, values.size)) * by_value(scale, values.size)
        codes = nearest(places, values, bounds, _STEPS) | np.signbit(values).astype(np.uint8) << np.uint8(7)
    return bounds.astype("<f4").tobytes() + codes.tobytes()


def _read(data: bytes, count: int) -> Values:
    bounds = read_bounds(data, count).astype(np.float64)
    codes = np.frombuffer(data, np.uint8, count, len(data) - count)
    low, spread = np.ascontiguousarray(bounds[:, 0]), bounds[:, 1] - bounds[:, 0]
    loops = loops_for(count)
    if loops is not None:
        values = np.empty(count, np.float32)
        loops.read_even(low, spread, _RATIOS, codes, BLOCK, values)
        return values
    magnitudes: Values = (by_value(low, count) + by_value(spread, count) * _RATIOS[codes & 127]).astype(np.float32)
    magnitudes[codes > 127] *= -1
    return magnitudes


INT8 = ValueFormat("int8", 8, False, _write, _read, BLOCK, BOUND_BYTES)

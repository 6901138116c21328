"""Four bits a value: sign (the highest bit) and 8 magnitudes between the bounds of a block, two values a byte.

The fourth roots of the levels are evenly spaced: the levels are nearly geometric, which suits what top-k selection
leaves over (two thirds of the squared error of even spacing on Laplace tails, a third on Student's t3), and unlike
geometric ones they reach down to zero and need square roots only, which every machine rounds alike. A block that holds
a zero has 0 for its lower bound, so zeros come back as zeros, and so may the smallest values beside them.

The bounds come first; then the values, the first of two in the low bits. An odd one leaves four zero bits.
"""

import numpy as np

from pscore.wire.codecs.values.bounds import (
    BLOCK,
    BOUND_BYTES,
    bounds_of,
    by_value,
    fourth_root,
    loops_for,
    nearest,
    read_bounds,
    spacing,
)
from pscore.wire.codecs.values.format import ValueFormat, Values
from pscore.wire.errors import ErrorCode, Rejected

_STEPS = 7
_RATIOS = np.arange(_STEPS + 1) / _STEPS


def _write(values: Values) -> bytes:
    bounds = bounds_of(values)
    # In fp32, which is faster: the reader needs the exact levels, the writer only the one that is near.
    low, scale = spacing(fourth_root(bounds), _STEPS)
    codes = np.empty(values.size, np.uint8)
    packed = np.empty(-(-values.size // 2), np.uint8)
    loops = loops_for(values.size)
    if loops is not None:
        loops.write_rooted(values, bounds, low, scale, np.float32(_STEPS), BLOCK, codes)
        loops.pack(codes, packed)
    else:
        places = (fourth_root(np.abs(values)) - by_value(low, values.size)) * by_value(scale, values.size)
        codes = nearest(places, values, bounds, _STEPS) | np.signbit(values).astype(np.uint8) << np.uint8(3)
        packed[:] = codes[::2]
        packed[: values.size // 2] |= codes[1::2] << 4
    return bounds.astype("<f4").tobytes() + packed.tobytes()


def _read(data: bytes, count: int) -> Values:
    bounds = read_bounds(data, count)
    packed = np.frombuffer(data, np.uint8, -1, bounds.nbytes)
    if count % 2 and packed[-1] > 15:
        raise Rejected(ErrorCode.BAD_CHUNK, "bits behind the last value are not zero")
    table = _levels(bounds)
    values = np.empty(count, np.float32)
    loops = loops_for(count)
    if loops is not None:
        loops.read_packed(table, packed, BLOCK, values)
        return values
    blocks = np.arange(len(table)).repeat(BLOCK)[:count]
    values[::2] = table[blocks[::2], packed & 15]
    values[1::2] = table[blocks[1::2], packed[: count // 2] >> 4]
    return values


def _levels(bounds: Values) -> Values:
    """Return fp32 ``[blocks, 16]``: what each code of a block stands for."""
    roots = fourth_root(bounds.astype(np.float64))
    roots = roots[:, :1] + (roots[:, 1:] - roots[:, :1]) * _RATIOS
    squares = roots * roots
    magnitudes = np.minimum(squares * squares, bounds[:, 1:]).astype(np.float32)
    return np.concatenate([magnitudes, -magnitudes], axis=1)


INT4 = ValueFormat("int4", 4, False, _write, _read, BLOCK, BOUND_BYTES)

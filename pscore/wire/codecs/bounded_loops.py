"""The compiled loops of the narrow value codecs."""

# mypy: ignore-errors

import math

import numpy as np

from pscore.jit import compiled


@compiled
def find_bounds(bits, block, bounds):
    """Fill in the least and the largest magnitude of each block.

    Everything is the bits of fp32 in int32, which have the same order and are compared in vector instructions.
    """
    for b in range(bounds.shape[0]):
        part = bits[b * block : (b + 1) * block]
        low, high = np.int32(0x7FFFFFFF), np.int32(0)
        for i in range(part.size):
            magnitude = part[i] & np.int32(0x7FFFFFFF)
            low, high = min(low, magnitude), max(high, magnitude)
        bounds[b, 0], bounds[b, 1] = low, high


@compiled
def write_levels(values, bounds, low, scale, steps, rooted, block, codes):
    """Fill in codes: the nearest of the evenly spaced levels of each value's block, and the sign in the bit above.

    ``rooted`` is ``None``, or the levels are evenly spaced between fourth roots; the compiler leaves the other branch
    out. Arithmetic is in the dtype of ``low``, ``scale`` and ``steps``.
    """
    none = steps - steps
    sign = np.int32(steps) + np.int32(1)
    for b in range(low.size):
        lowest, factor, highest = low[b], scale[b], bounds[b, 1]
        part, out = values[b * block : (b + 1) * block], codes[b * block : (b + 1) * block]
        for i in range(part.size):
            magnitude = abs(part[i])
            if rooted is None:
                level = np.rint((np.float64(magnitude) - lowest) * factor)
            else:
                level = np.rint((np.sqrt(np.sqrt(magnitude)) - lowest) * factor)
            level = level if level > none else none
            level = level if level < steps and magnitude < highest else steps
            out[i] = np.uint8(np.int32(level) + (sign if math.copysign(np.float32(1), part[i]) < 0 else np.int32(0)))


@compiled
def read_packed(table, packed, block, values):
    """Fill in values from pairs of 4-bit codes; ``table`` is fp32 ``[blocks, 16]``, and a block an even size."""
    for b in range(table.shape[0]):
        levels = table[b]
        part, out = packed[b * block // 2 : (b + 1) * block // 2], values[b * block : (b + 1) * block]
        for i in range(out.size // 2):
            code = np.int32(part[i])
            out[2 * i], out[2 * i + 1] = levels[code & 15], levels[code >> 4]
        if out.size % 2:
            out[-1] = levels[part[-1] & 15]


@compiled
def read_even(low, spread, ratios, codes, block, values):
    """Fill in values: ``ratios`` are the parts of a block's spread that the codes stand for, above 127 with a minus."""
    for b in range(low.size):
        lowest, width = low[b], spread[b]
        part, out = codes[b * block : (b + 1) * block], values[b * block : (b + 1) * block]
        for i in range(part.size):
            code = np.int32(part[i])
            magnitude = np.float32(lowest + width * ratios[code & 127])
            out[i] = -magnitude if code > 127 else magnitude

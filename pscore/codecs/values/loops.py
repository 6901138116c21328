"""The loops behind 8-bit and 4-bit values, for numba; imported at their first use, ``None`` where it is missing."""

# mypy: ignore-errors

import math

import numpy as np

from pscore.kernels.compiled import compile_once


@compile_once
def write_codes(values, low, scale, steps, block, sign, rooted, codes):
    """Fill in codes: the nearest level of each value's block, and its sign."""
    for b in range(low.size):
        lowest, factor = low[b], scale[b]
        for i in range(b * block, min((b + 1) * block, values.size)):
            magnitude = np.float64(abs(values[i]))
            if rooted:
                magnitude = math.sqrt(math.sqrt(magnitude))
            level = min(max(np.rint((magnitude - lowest) * factor), 0.0), steps)
            code = np.uint8(level)
            if math.copysign(np.float32(1), values[i]) < 0:
                code |= sign
            codes[i] = code


@compile_once
def read_codes(table, codes, width, block, values):
    """Fill in values from a table of ``width`` levels a block."""
    for b in range(-(-codes.size // block)):
        start = b * width
        for i in range(b * block, min((b + 1) * block, codes.size)):
            values[i] = table[start + codes[i]]

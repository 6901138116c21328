"""The compiled loops of the value codecs: one call writes a chunk's values, one call checks and reads them.

fp32 numbers that are only compared are their bits in int32: those of magnitudes have the same order, and are compared
in vector instructions. Bytes that are read are uint8: a view inside a message need not be aligned.
"""

# mypy: ignore-errors

import numpy as np

from pscore.jit import compiled

# The constants of the format stand here because numba's cache watches the file of a function and no other.
BLOCK = 512
"""Values that share bounds: 64 bits a block are 1/8 bit a value."""

NOT_FINITE, WRONG_ORDER = 1, 2

_MINUS, _MAGNITUDE, _INFINITY = np.int32(-0x80000000), np.int32(0x7FFFFFFF), np.int32(0x7F800000)


@compiled
def bounds_of(bits):
    """Return the least and the largest magnitude."""
    low, high = _MAGNITUDE, np.int32(0)
    for i in range(bits.size):
        low, high = min(low, bits[i] & _MAGNITUDE), max(high, bits[i] & _MAGNITUDE)
    return low, high


@compiled
def split_bounds(data, count):
    """Return the bounds of ``count`` values, the bytes behind them, and 0 or what is wrong with the bounds."""
    end = 8 * -(-count // BLOCK)
    bounds = data[:end].view(np.float32)
    return bounds, data[end:], wrong_bounds(bounds.view(np.int32))


@compiled
def wrong_bounds(bits):
    """Return 0, or what is wrong with any of the bounds that were received."""
    highest = wrong = np.int32(0)
    for i in range(0, bits.size, 2):
        highest = max(highest, max(bits[i] & _MAGNITUDE, bits[i + 1] & _MAGNITUDE))
        wrong |= np.int32(bits[i] < 0) | np.int32(bits[i] > bits[i + 1])
    if highest >= _INFINITY:
        return NOT_FINITE
    return WRONG_ORDER if wrong else 0


@compiled
def fill_levels(bounds, levels):
    """Fill in the 8 magnitudes of a block's 4-bit codes."""
    high = np.float64(bounds[1])
    first, last = np.sqrt(np.sqrt(np.float64(bounds[0]))), np.sqrt(np.sqrt(high))
    for k in range(8):
        square = (first + (last - first) * (k / 7)) * (first + (last - first) * (k / 7))
        levels[k] = np.float32(min(square * square, high))


@compiled
def write8(values, bounds, codes, decoded):
    """Fill in the bounds of each block, the codes, and the values that are read from them.

    Returns whether all is finite. Arithmetic is in fp64.
    """
    bits, bound_bits, decoded_bits = values.view(np.int32), bounds.view(np.int32), decoded.view(np.int32)
    for block in range(bounds.shape[0]):
        part = bits[block * BLOCK : (block + 1) * BLOCK]
        low, high = bounds_of(part)
        bound_bits[block, 0], bound_bits[block, 1] = low, high
        if high >= _INFINITY:
            return False
        lowest, spread = np.float64(bounds[block, 0]), np.float64(bounds[block, 1]) - np.float64(bounds[block, 0])
        scale = 127 / spread if spread > 0 else 0.0
        exact, out = values[block * BLOCK : (block + 1) * BLOCK], decoded[block * BLOCK : (block + 1) * BLOCK]
        out_codes = codes[block * BLOCK : (block + 1) * BLOCK]
        for i in range(part.size):
            level = np.rint((np.float64(abs(exact[i])) - lowest) * scale)
            level = min(max(level, 0.0), 127.0) if part[i] & _MAGNITUDE < high else 127.0
            out[i] = np.float32(lowest + spread * (level / 127))
            out_codes[i] = np.uint8(np.int32(level) | (np.int32(128) if part[i] < 0 else np.int32(0)))
        out_bits = decoded_bits[block * BLOCK : (block + 1) * BLOCK]
        for i in range(part.size):
            out_bits[i] |= part[i] & _MINUS
    return True


@compiled
def read8(data, values):
    """Fill in values from bytes (uint8); return 0, or what is wrong with the bounds."""
    bounds, codes, wrong = split_bounds(data, values.size)
    if wrong:
        return wrong
    for block in range(bounds.size // 2):
        lowest = np.float64(bounds[2 * block])
        spread = np.float64(bounds[2 * block + 1]) - lowest
        part, out = codes[block * BLOCK : (block + 1) * BLOCK], values[block * BLOCK : (block + 1) * BLOCK]
        for i in range(part.size):
            code = np.int32(part[i])
            magnitude = np.float32(lowest + spread * (np.float64(code & 127) / 127))
            out[i] = -magnitude if code > 127 else magnitude
    return 0


@compiled
def write4(values, bounds, packed, decoded):
    """Fill in the bounds of each block, pairs of codes, and the values that are read from them.

    Returns whether all is finite. A value gets the nearest level; the lower one from the middle of two downwards.
    """
    bits, bound_bits, decoded_bits = values.view(np.int32), bounds.view(np.int32), decoded.view(np.int32)
    levels, cuts = np.empty(8, np.float32), np.empty(8, np.float32)
    level, cut = levels.view(np.int32), cuts.view(np.int32)
    codes = np.empty(BLOCK + 1, np.uint8)
    highest = np.int32(0)
    for block in range(bounds.shape[0]):
        part = bits[block * BLOCK : (block + 1) * BLOCK]
        low, high = bounds_of(part)
        bound_bits[block, 0], bound_bits[block, 1] = low, high
        highest = max(highest, high)

        fill_levels(bounds[block], levels)
        for k in range(1, 8):
            cuts[k] = np.float32((np.float64(levels[k - 1]) + np.float64(levels[k])) / 2)
            if cuts[k] >= levels[k]:
                cuts[k] = levels[k - 1]
        c1, c2, c3, c4, c5, c6, c7 = cut[1], cut[2], cut[3], cut[4], cut[5], cut[6], cut[7]
        l0, l1, l2, l3, l4, l5, l6, l7 = level[0], level[1], level[2], level[3], level[4], level[5], level[6], level[7]

        out = decoded_bits[block * BLOCK : (block + 1) * BLOCK]
        for i in range(part.size):
            size = part[i] & _MAGNITUDE
            code, value = np.int32(size > c1), l1 if size > c1 else l0
            code, value = code + np.int32(size > c2), l2 if size > c2 else value
            code, value = code + np.int32(size > c3), l3 if size > c3 else value
            code, value = code + np.int32(size > c4), l4 if size > c4 else value
            code, value = code + np.int32(size > c5), l5 if size > c5 else value
            code, value = code + np.int32(size > c6), l6 if size > c6 else value
            code, value = code + np.int32(size > c7), l7 if size > c7 else value
            out[i] = value | (part[i] & _MINUS)
            codes[i] = np.uint8(code + (np.int32(8) if part[i] < 0 else np.int32(0)))
        codes[part.size] = 0
        pairs = packed[block * BLOCK // 2 : (block + 1) * BLOCK // 2]
        for i in range(pairs.size):
            pairs[i] = codes[2 * i] | codes[2 * i + 1] << 4
    return highest < _INFINITY


@compiled
def read4(data, values):
    """Fill in values from bytes (uint8); return 0, or what is wrong with the bounds."""
    bounds, packed, wrong = split_bounds(data, values.size)
    if wrong:
        return wrong
    levels = np.empty(16, np.float32)
    for block in range(bounds.size // 2):
        fill_levels(bounds[2 * block : 2 * block + 2], levels)
        for k in range(8):
            levels[8 + k] = -levels[k]
        part, out = packed[block * BLOCK // 2 : (block + 1) * BLOCK // 2], values[block * BLOCK : (block + 1) * BLOCK]
        for i in range(out.size // 2):
            code = np.int32(part[i])
            out[2 * i], out[2 * i + 1] = levels[code & 15], levels[code >> 4]
        if out.size % 2:
            out[-1] = levels[part[-1] & 15]
    return 0


@compiled
def read_fp32(data, copy):
    """Fill in fp32 values, as their bits in int32, from bytes (uint8); return whether all are finite."""
    largest, bits = np.int32(0), data.view(np.int32)
    for i in range(bits.size):
        copy[i] = bits[i]
        largest = max(largest, bits[i] & _MAGNITUDE)
    return largest < _INFINITY

"""The compiled loops of the codecs without parameters or bounds."""

# mypy: ignore-errors

import numpy as np

from pscore.jit import compiled

_0, _1, _2, _4, _56 = (np.uint64(number) for number in (0, 1, 2, 4, 56))
_PAIRS, _FOURS, _EIGHTS = (np.uint64(mask) for mask in (0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F))
_ONES = np.uint64(0x0101010101010101)


@compiled
def read_raw(words, base, offsets):
    """Fill in offsets (int64) from uint32 ones, plus ``base``; return whether they rise strictly."""
    falls, previous = np.int64(0), np.int64(-1)
    for i in range(words.size):
        word = np.int64(words[i])
        offsets[i] = word + base
        falls |= np.int64(word <= previous)
        previous = word
    return falls == 0


@compiled
def read_bitmap(data, count, base, offsets):
    """Fill in the places of the 1 bits of bytes (uint8), plus ``base``, if there are ``count``; return how many are."""
    words = np.zeros(data.size // 8 + 1, np.uint64)
    octets = words.view(np.uint8)
    for i in range(data.size):
        octets[i] = data[i]
    ones = np.int64(0)
    for word in words:
        bits = word - ((word >> _1) & _PAIRS)
        bits = (bits & _FOURS) + ((bits >> _2) & _FOURS)
        ones += np.int64((((bits + (bits >> _4)) & _EIGHTS) * _ONES) >> _56)
    if ones != count or offsets.size != count:
        return ones
    entry, start = 0, np.int64(base)
    for word in words:
        while word != _0:
            bits = ~word & (word - _1)
            bits -= (bits >> _1) & _PAIRS
            bits = (bits & _FOURS) + ((bits >> _2) & _FOURS)
            offsets[entry] = start + np.int64((((bits + (bits >> _4)) & _EIGHTS) * _ONES) >> _56)
            entry += 1
            word &= word - _1
        start += 64
    return ones


@compiled
def copy_bits(bits, copy):
    """Copy fp32 values, given as their bits (int32); return whether all are finite."""
    largest = np.int32(0)
    for i in range(bits.size):
        copy[i] = bits[i]
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    return largest < np.int32(0x7F800000)

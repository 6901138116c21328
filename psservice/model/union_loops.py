"""The compiled loops of unions of changes: a bitmap is marked and scanned."""

# mypy: ignore-errors

import numpy as np

from pscore.jit import compiled

_0, _1, _2, _4, _6, _56 = (np.uint64(number) for number in (0, 1, 2, 4, 6, 56))
_PAIRS, _FOURS, _EIGHTS = (np.uint64(mask) for mask in (0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F))
_ONES = np.uint64(0x0101010101010101)
_FEW = 16  # times fewer entries, from which on each is searched


@compiled
def lowest(word):
    """Return the place of the lowest 1 bit of a uint64; the compiler makes one instruction of this."""
    bits = ~word & (word - _1)
    bits -= (bits >> _1) & _PAIRS
    bits = (bits & _FOURS) + ((bits >> _2) & _FOURS)
    return np.int64((((bits + (bits >> _4)) & _EIGHTS) * _ONES) >> _56)


@compiled
def mark(words, offsets):
    """Set the bits of ``offsets`` in ``words`` (uint64, 64 elements each)."""
    for i in range(offsets.size):
        offset = offsets[i]
        words[offset >> 6] |= np.uint64(1) << np.uint64(offset & 63)


@compiled
def mark_new(words, offsets, first, found):
    """Set the bits of the offsets from ``first`` on; write those whose bits were not set, and return how many."""
    count = 0
    for i in range(offsets.size):
        offset = offsets[i]
        bit = np.uint64(1) << np.uint64(offset & 63)
        if offset >= first and words[offset >> 6] & bit == _0:
            words[offset >> 6] |= bit
            found[count] = offset
            count += 1
    return count


@compiled
def take(x, offsets, values):
    """``values = x[offsets]``."""
    for i in range(offsets.size):
        values[i] = x[offsets[i]]


@compiled
def gather(words, x, offsets, values):
    """Write the offsets of the bits that are set, ascending, and ``x`` there; without ``x`` offsets only.

    As many as there is room for in ``offsets``.
    """
    count = 0
    for number in range(words.size):
        word = words[number]
        while word != _0 and count < offsets.size:
            offset = (number << 6) + lowest(word)
            offsets[count] = offset
            if x is not None:
                values[count] = x[offset]
            count += 1
            word &= word - _1


@compiled
def overwrite(offsets, values, later_offsets, later_values):
    """Replace the values at offsets that are in both lists, which ascend, by the second list's."""
    i = 0
    if later_offsets.size > offsets.size // _FEW:
        for j in range(later_offsets.size):
            offset = later_offsets[j]
            while i < offsets.size and offsets[i] < offset:
                i += 1
            if i < offsets.size and offsets[i] == offset:
                values[i] = later_values[j]
        return
    for j in range(later_offsets.size):
        offset, step = later_offsets[j], 1
        while i + step < offsets.size and offsets[i + step] <= offset:  # gallop: one list may be far longer
            i += step
            step *= 2
        while step >= 1:
            if i + step < offsets.size and offsets[i + step] <= offset:
                i += step
            step //= 2
        if i < offsets.size and offsets[i] == offset:
            values[i] = later_values[j]


def warm_up() -> None:
    """Run every loop once, so that no pull waits for the compiler."""
    words, x, values = np.ones(1, np.uint64), np.ones(64, np.float32), np.empty(1, np.float32)
    offsets = np.zeros(1, np.int64)
    for dtype in (np.int32, np.int64):
        mark(words, np.zeros(1, dtype))
    mark_new(words, offsets, 0, np.zeros(1, np.int32))
    for dtype in (np.int32, np.int64):
        take(x, np.zeros(1, dtype), values)
    for dtype in (np.int32, np.int64):
        overwrite(offsets, values, np.zeros(1, dtype), values)
    gather(words, None, offsets, None)
    gather(words, x, offsets, values)

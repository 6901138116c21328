"""The compiled loop that compares the words of a source with those of the baseline."""

# mypy: ignore-errors

import numpy as np

from pscore.jit import compiled

_TOGETHER = 32  # words that are compared before it is asked which of them differ


@compiled
def differing(mine, held, places):
    """Write the places at which two arrays of words differ into ``places``, which has room for all; return how many."""
    count, whole = 0, mine.size // _TOGETHER * _TOGETHER
    for start in range(0, whole, _TOGETHER):
        different = mine[start] ^ held[start]
        for i in range(start + 1, start + _TOGETHER):
            different |= mine[i] ^ held[i]
        if different:
            for i in range(start, start + _TOGETHER):
                places[count] = i
                count += mine[i] != held[i]
    for i in range(whole, mine.size):
        if mine[i] != held[i]:
            places[count] = i
            count += 1
    return count


def warm_up():
    """Run it once."""
    places = np.empty(64, np.int64)
    for dtype in (np.uint8, np.uint16, np.uint32):
        words = np.zeros(64, dtype)
        differing(words, words, places)

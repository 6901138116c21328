"""The compiled loops of :mod:`pscore.model.digest`."""

# mypy: ignore-errors

import numpy as np

from pscore.jit import compiled

_A, _B, _C, _D = (
    np.uint64(odd) for odd in (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F, 0x2545F4914F6CDD1D)
)
_E, _F, _G, _H = (
    np.uint64(odd) for odd in (0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3)
)
_29, _32 = np.uint64(29), np.uint64(32)


@compiled
def mix(index, word, first, second, third, fourth):
    """Mix an index and a word (both uint64) into 64 bits."""
    x = (index + fourth) * first
    x ^= x >> _32
    x = (x ^ (word * second)) * third
    x ^= x >> _29
    x *= fourth
    return x ^ (x >> _32)


@compiled
def of_run(words, start):
    """Return both halves of the sum over words (uint32) that stand from an index on."""
    low, high = np.uint64(0), np.uint64(0)
    for i in range(words.size):
        index, word = np.uint64(start + i), np.uint64(words[i])
        low += mix(index, word, _A, _B, _C, _D)
        high += mix(index, word, _E, _F, _G, _H)
    return low, high


@compiled
def at(words, offsets, start):
    """Return both halves of the sum over words (uint32) that stand at offsets from an index."""
    low, high = np.uint64(0), np.uint64(0)
    for i in range(words.size):
        index, word = np.uint64(start + offsets[i]), np.uint64(words[i])
        low += mix(index, word, _A, _B, _C, _D)
        high += mix(index, word, _E, _F, _G, _H)
    return low, high


def warm_up():
    """Run every loop once."""
    words = np.zeros(1, np.uint32)
    of_run(words, 0)
    at(words, np.zeros(1, np.int64), 0)

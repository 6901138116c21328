"""A seeded order of a dataset's samples that any worker computes for any part of it, without the rest.

All workers must compute the same order, in any version of torch and numpy, and none should store the order of a large
dataset. Hence a cipher instead of a shuffled list: a Feistel network over the smallest even number of bits for the
size, applied again if it leads out of the size (cycle walking). One round, with ``⊕`` bitwise and 64-bit
arithmetic that wraps::

    left, right = right, left ⊕ (mix(right + key[round]) mod 2^half)

``mix`` and the keys are SplitMix64's.
"""

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.uint64]

_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def shuffled(size: int, seed: int, epoch: int, start: int, end: int) -> list[int]:
    """Return the samples at the places ``[start, end)`` of the order of an epoch; ``size`` is at most ``2^48``."""
    half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    keys = _keys(seed, epoch)
    places = np.arange(start, end, dtype=np.uint64)
    samples = _encrypt(places, half, keys)
    while (outside := samples >= size).any():
        samples[outside] = _encrypt(samples[outside], half, keys)
    found: list[int] = samples.tolist()
    return found


def _encrypt(places: Places, half: int, keys: list[int]) -> Places:
    low = np.uint64((1 << half) - 1)
    left, right = places >> np.uint64(half), places & low
    for key in keys:
        left, right = right, left ^ (_mix(right + np.uint64(key)) & low)
    return (left << np.uint64(half)) | right


def _mix(z: Places) -> Places:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _keys(seed: int, epoch: int) -> list[int]:
    """Draw the rounds' keys: SplitMix64, begun at the seed mixed with the epoch."""
    state = int(_mix(np.array([(seed + _GOLDEN) & _MASK], np.uint64))[0]) ^ epoch
    states = np.array([(state + i * _GOLDEN) & _MASK for i in range(1, _ROUNDS + 1)], np.uint64)
    return [int(key) for key in _mix(states)]

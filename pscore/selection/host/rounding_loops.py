"""The compiled loop of :mod:`pscore.selection.host.rounding`."""

# mypy: ignore-errors

import numpy as np

from pscore.jit import compiled


@compiled
def narrow(numbers, turn, bits):
    """Round fp32 ``numbers``, given as uint32, to bf16, up or down by chance; see :func:`rounding.narrowed`."""
    # The mixing steps of MurmurHash3 (public domain), of the turn and then of place and number.
    turn = np.uint32((turn ^ (turn >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    turn = np.uint32((turn ^ (turn >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    for i in range(numbers.size):
        number = numbers[i]
        drawn = np.uint32(np.uint32(np.uint32(np.uint32(i) * np.uint32(0x9E3779B1)) + turn) ^ number)
        drawn = np.uint32((drawn ^ (drawn >> np.uint32(16))) * np.uint32(0x85EBCA6B))
        drawn = np.uint32((drawn ^ (drawn >> np.uint32(13))) * np.uint32(0xC2B2AE35))
        magnitude = number & np.uint32(0x7FFFFFFF)
        up = np.uint32(drawn >> np.uint32(16))
        if magnitude >= np.uint32(0x7F7F0000):  # the largest of bf16 and beyond: nothing finite is above
            up = np.uint32(0)
        if magnitude > np.uint32(0x7F800000):  # no number, and stays none
            number |= np.uint32(0x00400000)
        bits[i] = np.uint16(np.uint32(number + up) >> np.uint32(16))

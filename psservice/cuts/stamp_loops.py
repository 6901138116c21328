"""The compiled loops of :mod:`psservice.cuts.stamps` and :mod:`psservice.cuts.tracks`."""

# mypy: ignore-errors

import numpy as np

from pscore.jit import compiled
from pscore.wire.codecs.residue import UNKNOWN

LOST = 15  # places from which on an element has left its window


@compiled
def move(windows, offsets, steps):
    """Move elements by so many places; the low half of a window counts the places below, the high half those above."""
    for i in range(offsets.size):
        window = windows[offsets[i]]
        below, above = np.int32(window & 15), np.int32(window >> 4)
        if below < 15 and above < 15:
            below = min(max(below + steps[i], 0), 15)
            above = min(max(above - steps[i], 0), 15)
            windows[offsets[i]] = np.uint8(below + 16 * above)


@compiled
def shift(track, offsets, steps):
    """Add steps to those of a track; a number that leaves 127 on either side is -128 from then on."""
    for i in range(offsets.size):
        have = np.int32(track[offsets[i]])
        if have != -128:
            have += steps[i]
            track[offsets[i]] = np.int8(have if -128 < have < 128 else -128)


def warm_up():
    """Run every loop once."""
    offsets, steps = np.zeros(1, np.int64), np.zeros(1, np.int32)
    move(np.zeros(1, np.uint8), offsets, steps)
    shift(np.zeros(1, np.int8), offsets, steps)


_below, _above = np.arange(256) & 15, np.arange(256) >> 4
WIDTHS = np.where((_below == LOST) | (_above == LOST), UNKNOWN, _below + _above).astype(np.uint16)
"""Of each window: the most places between two words in it; ``UNKNOWN`` for an element that has left its window."""

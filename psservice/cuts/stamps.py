"""Since when each element of a model has been what readers have: a byte an element, however many versions ago.

The versions of cuts are numbered by epochs from 1, and an element bears the number of the epoch that changed it last.
Before the numbers are used up all are halved, rounded up for elements and down for versions. So the elements that have
changed since a version are always found, and for old versions some others with them, whose values a reader then gets
once more.

For words of 16 bits another byte has the window of an element: how many places of their order
(:mod:`pscore.wire.codecs.residue`) it has been below and above the present one, up to 14 each.
"""

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from pscore.wire.codecs.residue import UNKNOWN
from psservice.cuts import stamp_loops

Offsets = NDArray[np.int64]

_LAST_EPOCH = 255
_MOST_LOST = 1 / 8  # share of the elements that have left their windows, from which on windows begin anew


class Stamps:
    """The stamps of a shard of ``size`` elements, from a ``version`` on. Changed by one thread, read from any.

    ``has_windows``: whether distances are asked for.
    """

    def __init__(self, size: int, version: int, *, has_windows: bool) -> None:
        # The epoch of each element; versions, ascending, and the epoch that each has ended.
        self._state = np.zeros(size, np.uint8), [version], [0]
        self._epoch, self._begins = 0, True
        self._windows = (version, np.zeros(size, np.uint8)) if has_windows else None

    @property
    def nbytes(self) -> int:
        """Bytes that are occupied."""
        return self._state[0].nbytes * (1 if self._windows is None else 2)

    @property
    def began(self) -> int:
        """The version from which on changes are known."""
        return self._state[1][0]

    def note(self, offsets: Offsets, steps: NDArray[np.int32] | None) -> None:
        """Note elements that the next version changes, and by how many places, if windows are kept."""
        if self._begins:
            self._begins = False
            if self._epoch == _LAST_EPOCH:
                self._halve()
            self._epoch += 1
        self._state[0][offsets] = self._epoch
        if self._windows is not None and steps is not None:
            stamp_loops.move.on(offsets.size)(self._windows[1], offsets, steps)

    def end(self, version: int) -> None:
        """Name the version whose changes were noted."""
        epochs, versions, numbers = self._state
        if numbers[-1] != self._epoch:  # else the version before has the same values
            self._state = epochs, [*versions, version], [*numbers, self._epoch]
        self._begins = True

    def since(self, version: int) -> Offsets | None:
        """Return the elements that have changed since a version that readers have; ``None`` for a version before all.

        Some that have not may be among them.
        """
        later = self._later(version)
        return None if later is None else np.flatnonzero(later)

    def count_since(self, version: int) -> int | None:
        """Return how many elements :meth:`since` returns."""
        later = self._later(version)
        return None if later is None else int(np.count_nonzero(later))

    def _later(self, version: int) -> NDArray[np.bool_] | None:
        epochs, versions, numbers = self._state
        place = bisect_left(versions, version)
        if place == len(versions) or versions[place] != version:
            place -= 1
        if place < 0:
            return None
        later: NDArray[np.bool_] = epochs > numbers[place]
        return later

    def distances(self, version: int, offsets: Offsets) -> NDArray[np.uint16]:
        """Bound how many places elements are away from where they were at a version, and at any one since."""
        windows = self._windows
        if windows is None or version < windows[0]:
            return np.full(offsets.size, UNKNOWN, np.uint16)
        return stamp_loops.WIDTHS[windows[1][offsets]]

    def _halve(self) -> None:
        epochs, versions, numbers = self._state
        kept = [
            number for number in range(len(numbers)) if not number or numbers[number] >> 1 != numbers[number - 1] >> 1
        ]
        epochs = (epochs >> 1) + (epochs & 1)
        self._state = epochs, [versions[each] for each in kept], [numbers[each] >> 1 for each in kept]
        self._epoch = (_LAST_EPOCH >> 1) + 1
        if self._windows is not None:
            lost = np.count_nonzero(stamp_loops.WIDTHS[self._windows[1]] == UNKNOWN)
            if lost > _MOST_LOST * epochs.size:
                self._windows = versions[-1], np.zeros(epochs.size, np.uint8)

"""How far each 16-bit word is from where it was at the version of a reader that is behind: a byte an element.

Most words that have changed many times are back where they were, or next to it. A stamp says that they have changed; a
track says that, too. So a reader that is many versions behind gets little, if it was behind already when the cut that
it has was dropped. There are a few tracks, for the versions that most readers are at.
"""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pscore.wire.codecs.residue import UNKNOWN
from psservice.cuts import stamp_loops
from psservice.cuts.stamps import Offsets, Stamps

LOST = -128
"""Steps of an element that has gone too far, or has no order."""

_MOST_TRACKS = 4
_LONGEST_SECONDS = 600.0  # that a track keeps another one out


class Tracks:
    """The tracks of a shard of ``size`` elements. Changed by one thread, read from any.

    ``clock`` counts seconds.
    """

    def __init__(self, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._size, self._clock = size, clock
        self._steps: dict[int, NDArray[np.int8]] = {}  # by the version, the one that was begun first in front
        self._begun: dict[int, float] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are occupied."""
        return self._size * len(self._steps)

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that have a track."""
        return tuple(self._steps)

    def begin(self, version: int, offsets: Offsets, steps: NDArray[np.int32]) -> None:
        """Begin a track at a version, since which these elements have gone so many steps, if there is room for one."""
        now = self._clock()
        if len(self._steps) == _MOST_TRACKS:
            first = next(iter(self._steps))
            if now < self._begun[first] + _LONGEST_SECONDS:
                return
            self.end(first)
        track = np.zeros(self._size, np.int8)
        track[offsets] = np.where(np.abs(steps) < -LOST, steps, LOST)
        self._begun[version] = now
        self._steps = {**self._steps, version: track}

    def end(self, version: int) -> None:
        """Drop a track, if there is one."""
        self._steps = {each: steps for each, steps in self._steps.items() if each != version}
        self._begun.pop(version, None)

    def move(self, offsets: Offsets, steps: NDArray[np.int32] | None) -> None:
        """Move elements by so many steps; ``None``: they have no order. Their stamps have been set before."""
        for track in self._steps.values():
            if steps is None:
                track[offsets] = LOST
            else:
                stamp_loops.shift.on(offsets.size)(track, offsets, steps)

    def since(
        self, version: int, until: int, stamps: Stamps, has_room: Callable[[int], bool] = lambda count: True
    ) -> tuple[Offsets, NDArray[np.uint16]] | None:
        """Return the elements that differ between two versions, or may, and bounds of how far.

        The first is a reader's, the other that of a cut that is kept. ``None`` if the first is not tracked, or for so
        many elements there is no room.
        """
        track = self._steps.get(version)
        if track is None:
            return None
        steps = track.copy()  # before the stamps: what moves meanwhile is found by its stamp
        late = stamps.since(until)
        assert late is not None
        differs = steps != 0
        differs[late] = True
        if not has_room(int(np.count_nonzero(differs))):
            return None
        offsets = np.flatnonzero(differs)
        there = steps[offsets]
        distances = np.where(there == LOST, UNKNOWN, np.abs(there)).astype(np.uint16)
        if late.size:
            places = np.searchsorted(offsets, late)
            distances[places] = stamps.distances(version, late)
        return offsets, distances

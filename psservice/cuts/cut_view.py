"""A cut as readers of one data type have it, and the elements that they lack of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.codecs.residue import UNKNOWN
from psservice.cuts.stamps import Offsets, Stamps
from psservice.cuts.tracks import Tracks
from psservice.cuts.view import differences
from psservice.model.changelog import ALMOST_ALL, most_changed, union
from psservice.replies.exact_reply import SPARSE_ENTRY_BYTES, ModelValues, Reserve

Find = Callable[[int], ModelValues | None]
"""Returns the values of an older version, if they are still known."""


class Changes(NamedTuple):
    """Elements that differ from those of a version, or may.

    Attributes:
        offsets: in the shard, ascending.
        distances: how many places of their order words of 16 bits are away at most; else
            :data:`~pscore.wire.codecs.residue.UNKNOWN`.
    """

    offsets: Offsets
    distances: NDArray[np.uint16]

    @property
    def nbytes(self) -> int:
        """Bytes that are occupied."""
        return self.offsets.nbytes + self.distances.nbytes


@dataclass(frozen=True, slots=True)
class CutView:
    """A cut for readers of one data type; ``values`` are the cut's, in fp32."""

    values: ModelValues
    layout: ModelLayout
    digest: bytes
    stamps: Stamps
    tracks: Tracks

    def since(self, version: int | None, reserve: Reserve, find: Find) -> Changes | None:
        """Return the elements that readers with a version lack; ``None`` for all.

        Raises :class:`Rejected` by ``reserve``.

        The best is known of versions whose values are kept, then of those that are tracked, then of any since the
        shadow began, and of others what the change log tells.
        """
        model = self.values.model
        names_values = model.versions_name_values
        if version is None:
            return None
        if version == self.values.version and names_values:
            return Changes(np.empty(0, np.int64), np.empty(0, np.uint16))
        had = find(version) if names_values else None
        most = ALMOST_ALL * model.span.length

        def has_room(count: int) -> bool:
            if count >= most:
                return False
            reserve(SPARSE_ENTRY_BYTES * count)
            return True

        if had is None and names_values and version in self.tracks.versions:
            tracked = self.tracks.since(version, self.values.version, self.stamps, has_room)
            return None if tracked is None else Changes(*tracked)
        is_known = names_values or version > self.stamps.began
        if is_known and (count := self.stamps.count_since(version)) is not None:
            if not has_room(count):
                return None
            offsets = self.stamps.since(version)
        else:
            offsets = self._logged_since(version)
            if offsets is not None and not has_room(offsets.size):
                return None
        if offsets is None:
            return None
        return self._different(offsets, had) if had is not None else self._bounded(version, offsets)

    def _bounded(self, version: int, offsets: Offsets) -> Changes:
        return Changes(offsets, self.stamps.distances(version, offsets))

    def distances(self, version: int, part: Span) -> NDArray[np.uint16]:
        """Bound how far every element of a part of the shard is from where it was at a version, at this cut."""
        start, names_values = self.values.model.span.start, self.values.model.versions_name_values
        offsets = np.arange(part.start - start, part.end - start)
        return self.stamps.distances(version if names_values else -1, offsets)

    def _logged_since(self, version: int) -> Offsets | None:
        """Return the elements that have changed since a version from before the shadow, if the change log has them."""
        model, size = self.values.model, self.values.model.span.length
        changes = model.changes_between(version, self.stamps.began)
        since = self.stamps.since(self.stamps.began)
        if changes is None or most_changed(changes, size) is None or since is None:
            return None
        united = union([*(each if each is None else each.cpu() for each in changes), torch.from_numpy(since)], size)
        return None if united is None else united.long().numpy()

    def _different(self, offsets: Offsets, had: ModelValues) -> Changes:
        """Return those of the elements whose words are others than they were, and how far these are."""
        span, places = had.model.span, torch.from_numpy(offsets)
        before, after = (SparseSlice(span, places, values_of(each, places)) for each in (had, self.values))
        kept, distances = [np.empty(0, np.int64)], [np.empty(0, np.uint16)]
        for some, steps, _, _ in differences(self.layout, span, before, after):
            kept.append(some)
            near = np.full(some.size, UNKNOWN, np.uint16) if steps is None else np.abs(steps).astype(np.uint16)
            distances.append(near)
        return Changes(np.concatenate(kept), np.concatenate(distances))


def values_of(values: ModelValues, offsets: torch.Tensor) -> torch.Tensor:
    """Return the values at offsets of the shard (int64, on the host), fp32 on the host."""
    return values.values.gather(offsets.to(values.model.theta.device)).cpu()

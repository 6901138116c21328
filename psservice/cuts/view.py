"""The model as readers of one data type have it: which elements differ for them from version to version, and a digest.

A push changes every value of a dense step, and most of them so little that they are the same once rounded to 16 bits.
So a view compares words: those of the parameters' data types, with another one in place of fp32.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pscore.model.digest import DIGEST_BYTES, ModelDigest
from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.codecs.residue import places_of
from psservice.cuts.stamps import Stamps
from psservice.cuts.tracks import LOST, Tracks


class View:
    """A view of a shard from a version on; filled by :meth:`add`, changed by :meth:`change`, by one thread.

    Attributes:
        layout: of the model, as these readers have it.
        digest: of the shard's values, in this layout.
        stamps: since when each element has been as it is.
        tracks: how far each is from where some readers have it.
        has_words: whether there are parameters of 16 bits.
    """

    def __init__(self, layout: ModelLayout, span: Span, version: int) -> None:
        self.layout, self._span = layout, span
        self.digest = bytes(DIGEST_BYTES)
        self.has_words = any(dtype.itemsize == 2 for dtype, _ in layout.dtype_runs(span))
        self.stamps = Stamps(span.length, version, has_windows=self.has_words)
        self.tracks = Tracks(span.length)

    def add(self, values: SparseSlice) -> None:
        """Take in values, fp32 on the host, of elements that the view does not have yet."""
        digest = ModelDigest(self.layout, self.digest)
        digest.add(values)
        self.digest = digest.value

    @property
    def nbytes(self) -> int:
        """Bytes that are occupied."""
        return self.stamps.nbytes + self.tracks.nbytes

    def change(self, before: SparseSlice, after: SparseSlice) -> None:
        """Put values in the place of those before, of the same elements, all fp32 on the host."""
        digest = ModelDigest(self.layout, self.digest)
        for offsets, steps, old, new in differences(self.layout, self._span, before, after):
            self.stamps.note(offsets, steps)
            self.tracks.move(offsets, steps)
            places = torch.from_numpy(offsets)
            digest.remove(SparseSlice(self._span, places, old))
            digest.add(SparseSlice(self._span, places, new))
        self.digest = digest.value

    def track(self, version: int, before: SparseSlice, after: SparseSlice) -> None:
        """Begin a track at a version, since which no other elements than these have changed."""
        offsets, steps = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
        for some, gone, _, _ in differences(self.layout, self._span, before, after):
            offsets.append(some)
            steps.append(np.full(some.size, LOST, np.int32) if gone is None else gone)
        self.tracks.begin(version, np.concatenate(offsets), np.concatenate(steps))

    def end(self, version: int) -> None:
        """Name the version to which the changes since the last call lead."""
        self.stamps.end(version)


def differences(
    layout: ModelLayout, span: Span, before: SparseSlice, after: SparseSlice
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int32] | None, torch.Tensor, torch.Tensor]]:
    """Yield which of the same elements of a shard (``span``) have other words, and how far these are.

    That is: their offsets in the shard, how many places each has gone, or ``None`` if words of this size have no order,
    and the values before and after. All values are fp32 on the host.
    """
    for dtype, run in layout.dtype_runs(after.span):
        old, new = before.clip(run), after.clip(run)
        if old is None or new is None:
            continue
        old_words, new_words = rounded_words(old.values, dtype), rounded_words(new.values, dtype)
        places = np.flatnonzero(old_words != new_words)
        if not places.size:
            continue
        first = new.span.start - span.start
        offsets = places + first if new.offsets is None else new.offsets.numpy()[places] + first
        steps = None
        if dtype.itemsize == 2:
            steps = places_of(new_words[places]).astype(np.int32) - places_of(old_words[places])
        chosen = torch.from_numpy(places)
        yield offsets, steps, old.values[chosen], new.values[chosen]


def rounded_words(values: torch.Tensor, dtype: torch.dtype) -> NDArray[Any]:
    """Return the bits of fp32 values on the host as torch rounds them to a dtype, none is NaN; or of a feed's words."""
    numbers = values.numpy()
    if values.dtype == dtype:
        return numbers.view(f"u{numbers.itemsize}")
    if dtype == torch.float16:
        with np.errstate(over="ignore"):
            return numbers.astype(np.float16).view(np.uint16)
    bits = numbers.view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) >> 16).astype(np.uint16)
    return rounded

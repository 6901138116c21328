"""A shard's values at the newest cut, beside those that pushes change: what readers get costs the apply thread nothing.

The shadow is brought to a newer version by what has changed since its own, read beside the apply thread as exact
replies are. So it takes four bytes a parameter once somebody follows, and the older cuts take those values that it has
overwritten.
"""

from collections.abc import Collection

import torch

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.dense import cut
from psservice.cuts.view import View
from psservice.model.copies import CopyOnWrite, values_at
from psservice.model.parameters import ModelShard
from psservice.replies.exact_reply import ExactReplies, ModelValues, ParameterThread

ReaderType = torch.dtype | None
"""In which readers hold the run's fp32 parameters; ``None``: as the run has them."""

_BLOCK = 1 << 18  # elements that are compared at a time


class Shadow:
    """A copy of a model's values. Advanced by one thread at a time; its copies are read from any.

    Attributes:
        version: of the values.
        views: by the readers' data type.
    """

    def __init__(self, model: ModelShard, apply_thread: ParameterThread) -> None:
        """Copy the model as it is; raises :class:`~pscore.wire.errors.Rejected`."""
        self.model = model
        self._exact = ExactReplies(model, apply_thread, 0, lambda nbytes: None)
        self._theta = torch.empty_like(model.theta)
        self._copies = CopyOnWrite()
        self.views: dict[ReaderType, View] = {}
        self.version = -1
        self._copy()

    @property
    def nbytes(self) -> int:
        """Bytes that are occupied, with what is kept for cuts."""
        return self._theta.nbytes + self._copies.nbytes + sum(view.nbytes for view in [*self.views.values()])

    @property
    def is_read(self) -> bool:
        """Whether somebody has values of it, for whom what is overwritten is kept."""
        return self._copies.is_open

    @property
    def track_bytes(self) -> int:
        """Bytes of a track of a version, in each view that has some."""
        return self.model.span.length * sum(view.has_words for view in self.views.values())

    def values(self) -> ModelValues:
        """Return the values at this version, which stay as they are as long as somebody has them."""
        return ModelValues.opened(self.model, 0, self.version, self._copies.open(self._theta))

    def advance(self, types: Collection[ReaderType] = (None,)) -> None:
        """Go to the model's version, with views of these types; raises :class:`~pscore.wire.errors.Rejected`."""
        model = self.model
        if not (model.versions_name_values and model.version == self.version):
            found = self._exact.read(self.version) if model.versions_name_values else None
            if found is None:
                self._copy()
            else:
                self._go_to(found[1], *found[2])
        kept = {dtype: view for dtype, view in self.views.items() if dtype in types}
        self.views = kept | {dtype: self._view(dtype) for dtype in types if dtype not in kept}

    def track(self, version: int, values: ModelValues) -> None:
        """Have tracks of an older version, whose values these are, for readers of 16 bits."""
        span, device = self.model.span, self._theta.device
        for view in self.views.values():
            if view.has_words and (since := view.stamps.since(version)) is not None:
                offsets = torch.from_numpy(since).to(device)
                before = SparseSlice(span, offsets, values.values.gather(offsets)).cpu()
                view.track(version, before, SparseSlice(span, offsets, values_at(self._theta, offsets)).cpu())

    def keep_tracks(self, versions: Collection[int]) -> None:
        """Drop the tracks of other versions than these."""
        for view in self.views.values():
            for version in set(view.tracks.versions).difference(versions):
                view.tracks.end(version)

    def _go_to(self, version: int, offsets: torch.Tensor, values: torch.Tensor) -> None:
        if self.views:
            span = self.model.span
            before = SparseSlice(span, offsets, values_at(self._theta, offsets)).cpu()
            after = SparseSlice(span, offsets, values).cpu()
            for view in self.views.values():
                view.change(before, after)
        self._copies.overwrites(self._theta, offsets)
        if values.is_cpu:  # numpy stays on this thread
            self._theta.numpy()[offsets.numpy()] = values.numpy()
        else:
            self._theta[offsets] = values
        self._end(version)

    def _copy(self) -> None:
        """Take all values anew."""
        found = self._exact.copy()
        self._copies.overwrites(self._theta, None)
        for part in found.parts(self.model.span):
            place = self._place(part.span)
            if self.views:
                before, after = SparseSlice(part.span, None, place).cpu(), part.cpu()
                for view in self.views.values():
                    view.change(before, after)
            place.copy_(part.values)
        self._end(found.version)

    def _end(self, version: int) -> None:
        self.version = version
        for view in self.views.values():
            view.end(version)

    def _view(self, dtype: ReaderType) -> View:
        model = self.model
        view = View(model.layout.viewed_in(dtype), model.span, self.version)
        for part in cut(model.span, _BLOCK):
            view.add(SparseSlice(part, None, self._place(part)).cpu())
        return view

    def _place(self, part: Span) -> torch.Tensor:
        start = self.model.span.start
        return self._theta[part.start - start : part.end - start]

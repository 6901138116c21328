"""Selecting from the difference between a shard and the image of a replica, among what changed where that is less.

After a selection no entry that was not sent differs by more than the smallest one that was: the tensor's *bound*. So
the next selection finds the same entries among those that the log of changes names, and those sent rounded, as among
all, if enough of them exceed the bound. Otherwise that tensor is searched whole, and its bound falls.
"""

import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pscore.select import Selector, entries_for
from pscore.select.base import largest, nothing, take_all
from pscore.select.inputs import Difference
from pscore.select.kernels import device_selection, kernels_for
from pscore.select.kernels.base import Taken
from pscore.select.kernels.cuda import PendingTaken
from pscore.select.warm import warm
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.model.changelog import ChangedIndices, union
from psservice.model.parameters import ModelShard

_FEW = 0.75
"""Share of ``k`` below which a tensor is searched whole."""

_WORTH_IT = 1 / 40
"""Changed entries over elements from which one search of everything is cheaper: it reads in order (measured)."""


class ImageBudget:
    """Bytes that images may occupy together, on the device of the parameters; 0 for no image. Thread-safe."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.bytes = 0
        self._lock = threading.RLock()  # garbage collection may free an image's room under the lock

    def make(self, nbytes: int, make: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        """Make an image, whose room is free again with its last reference; ``None`` where there is no room."""
        with self._lock:
            if self.bytes + nbytes > self.most:
                return None
            self.bytes += nbytes
        try:
            image = make()
        except BaseException:
            self._free(nbytes)
            raise
        weakref.finalize(image, self._free, nbytes)
        return image

    def _free(self, nbytes: int) -> None:
        with self._lock:
            self.bytes -= nbytes


@dataclass(frozen=True, slots=True)
class TopKSettings:
    """How a top-k reply is made and travels.

    Attributes:
        density: share of a tensor's entries that is sent.
        dense_below: tensors with fewer elements are sent whole.
        value: value codec, by its number in the proto.
        chunk_bytes: largest payload of a chunk.
        images: where no room is left, no further worker is answered so.
    """

    density: float
    dense_below: int
    selector: Selector
    value: int = pb.VALUE_CODEC_FP32
    chunk_bytes: int = 1 << 20
    images: ImageBudget = field(default_factory=lambda: ImageBudget(sys.maxsize))

    def entries(self, length: int) -> int:
        """Return the entries that are sent of a tensor with so many."""
        return length if length < self.dense_below else entries_for(length, self.density)


@dataclass(slots=True)
class DifferenceSelection:
    """The state of one worker's image from reply to reply."""

    settings: TopKSettings
    version: int | None = None
    _bounds: dict[int, float] = field(default_factory=dict)
    _recalls: dict[int, dict[str, Any]] = field(default_factory=dict)
    _rounded: torch.Tensor | None = None

    def select(self, model: ModelShard, image: torch.Tensor) -> tuple[int, Taken]:
        """Select from ``theta − image``; return a version that is in the selection, and later changes perhaps too.

        Each shard selects from its own part of a tensor that a border cuts; offsets count from the span's start.
        """
        version, theta, start = model.version, model.theta, model.span.start  # the version before anything else
        changed = None if self.version is None else model.changelog.since(self.version)
        spans = {
            position: slice(common.start - start, common.end - start)
            for position, common in model.layout.overlapping(model.span)
        }
        among = self._among(theta, changed)
        found = {} if among is None else self._from_changed(theta, image, spans, among)
        found |= self._from_all(theta, image, {i: part for i, part in spans.items() if i not in found})
        self.version = version
        pieces = [found[position] for position in spans]
        if not pieces:
            return version, nothing(theta)
        joined = (torch.cat([taken.offsets for taken in pieces]), torch.cat([taken.values for taken in pieces]))
        return version, Taken(*joined)

    def sent(self, taken: Taken, arrived: torch.Tensor) -> None:
        """Note the values with which the selected entries have been sent: rounded ones are searched again."""
        where = (taken.values != arrived).nonzero().view(-1)
        self._rounded = taken.offsets[where] if where.numel() else None

    def _among(self, theta: torch.Tensor, changed: list[ChangedIndices] | None) -> list[torch.Tensor] | None:
        """Return sets of offsets that cover every entry that may exceed its bound; ``None``: search everything."""
        if theta.device.type != "cpu" or changed is None:
            return None
        known = [each for each in changed if each is not None]
        if len(known) < len(changed) or sum(each.numel() for each in known) > _WORTH_IT * theta.numel():
            return None
        return known if self._rounded is None else [*known, self._rounded]

    def _from_changed(
        self, theta: torch.Tensor, image: torch.Tensor, spans: dict[int, slice], among: list[torch.Tensor]
    ) -> dict[int, Taken]:
        """Select in the tensors in which enough entries exceed the bound."""
        ends = np.array([part.stop for part in spans.values()], dtype=np.int64)
        bounds = np.array([self._bounds[position] for position in spans], dtype=np.float32)
        kernels = kernels_for(theta)
        offsets = union([kernels.exceeding(theta, image, each, ends, bounds) for each in among], theta.numel())
        assert offsets is not None
        values = theta[offsets] - image[offsets]
        cuts = [0, *np.searchsorted(offsets.numpy(), ends).tolist()]
        found = {}
        for number, (position, whole) in enumerate(spans.items()):
            part = slice(cuts[number], cuts[number + 1])
            taken = Taken(offsets[part], values[part])
            size = whole.stop - whole.start
            if size >= self.settings.dense_below:
                k = self.settings.entries(size)
                if taken.offsets.numel() < _FEW * k:
                    continue
                if taken.offsets.numel() > k:
                    chosen = largest(taken.values, k)
                    taken = Taken(taken.offsets[chosen], taken.values[chosen])
                    self._bounds[position] = float(taken.values.abs().min())
            found[position] = taken
        return found

    def _from_all(self, theta: torch.Tensor, image: torch.Tensor, spans: dict[int, slice]) -> dict[int, Taken]:
        """Select in whole tensors; on a device, launch all of them before the first is waited for."""
        device = device_selection(theta.device) if self.settings.selector is warm else None
        pending: dict[int, Taken | PendingTaken] = {}
        for position, part in spans.items():
            a, b = theta[part], image[part]
            k, recall = self.settings.entries(a.numel()), self._recalls.setdefault(position, {})
            if a.numel() < self.settings.dense_below:
                pending[position] = take_all(Difference(a, b))
            elif device is not None:
                pending[position] = device.take_difference(a, b, k, recall)
            else:
                pending[position] = self.settings.selector(Difference(a, b), k, recall)
        found = {}
        for position, part in spans.items():
            taken = pending[position]
            if not isinstance(taken, Taken):
                taken.collect()
                taken = taken.on_device()
            small = part.stop - part.start < self.settings.dense_below
            self._bounds[position] = 0.0 if small or not taken.values.numel() else float(taken.values.abs().min())
            found[position] = Taken(taken.offsets + part.start, taken.values)
        return found

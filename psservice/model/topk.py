"""Selecting from the difference between a shard and the image of a replica, among what changed where that is less.

After a selection every entry that was not sent differs by no more than the smallest one that was: the tensor's *bound*.
An entry that no push has touched since cannot have come to differ by more. So the next selection need look only at what
the ledger says has changed (and at what was sent rounded), and takes from it what exceeds the bound: the same entries
that a look at everything would have found. Where too few exceed it, that tensor is looked at whole; its bound falls.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pscore.model.layout import ModelLayout, Span
from pscore.select import Selector, entries_for
from pscore.select.base import largest, nothing, take_all
from pscore.select.inputs import Difference
from pscore.select.kernels import device_selection, kernels_for
from pscore.select.kernels.base import Taken
from pscore.select.kernels.cuda import PendingTaken
from pscore.select.warm import warm
from psservice.model.changelog import ChangedIndices

_FEW = 0.75
"""Share of ``k`` below which a tensor is looked at whole."""

_WORTH_IT = 1 / 40
"""Changed entries over elements from which one look at everything is cheaper: it reads in order (measured)."""


@dataclass(frozen=True, slots=True)
class DownSettings:
    """How a top-k reply selects.

    Attributes:
        density: share of a tensor's entries that is sent.
        dense_below: tensors with fewer elements are sent whole.
        selector: takes about k entries.
    """

    density: float
    dense_below: int
    selector: Selector


@dataclass(slots=True)
class DifferenceSelection:
    """What is remembered of one worker's image from reply to reply.

    Attributes:
        version: the shard's when it was last selected from; ``None`` before.
        looks: how many tensors were looked at whole, and how many among what changed.
    """

    settings: DownSettings
    version: int | None = None
    looks: dict[str, int] = field(default_factory=lambda: {"whole": 0, "changed": 0})
    _bounds: dict[int, float] = field(default_factory=dict)
    _recalls: dict[int, dict[str, Any]] = field(default_factory=dict)
    _rounded: torch.Tensor | None = None

    def select(
        self,
        theta: torch.Tensor,
        image: torch.Tensor,
        layout: ModelLayout,
        span: Span,
        version: int,
        changed: list[ChangedIndices] | None,
    ) -> Taken:
        """Select from ``theta − image``; offsets count from the span's start.

        Args:
            theta: the shard's parameters, fp32 ``[span.length]``.
            image: likewise.
            layout: the model's.
            span: what the shard owns of it. A tensor that a border cuts is selected from by each shard for its part.
            version: the shard's, read before anything else.
            changed: what each version since :attr:`version` has changed; ``None`` where that is not known.
        """
        spans = {
            position: slice(common.start - span.start, common.end - span.start)
            for position, common in layout.overlapping(span)
        }
        among = self._among(theta, changed)
        found = {} if among is None else self._from_changed(theta, image, spans, among)
        self.looks["changed"] += len(found)
        self.looks["whole"] += len(spans) - len(found)
        found |= self._from_all(
            theta, image, {position: spans[position] for position in spans if position not in found}
        )
        self.version = version
        pieces = [found[position] for position in spans]
        if not pieces:
            return nothing(theta)
        return Taken(torch.cat([taken.offsets for taken in pieces]), torch.cat([taken.values for taken in pieces]))

    def sent(self, taken: Taken, arrived: torch.Tensor) -> None:
        """Note as what values the selected entries have been sent: what was rounded is looked at again."""
        where = (taken.values != arrived).nonzero().view(-1)
        self._rounded = taken.offsets[where] if where.numel() else None

    def forget(self) -> None:
        """Begin anew, with another image."""
        self.version = None
        self._bounds.clear()
        self._recalls.clear()
        self._rounded = None

    def _among(self, theta: torch.Tensor, changed: list[ChangedIndices] | None) -> list[torch.Tensor] | None:
        """Return sets of offsets that hold every entry that may exceed its bound; ``None``: look at all."""
        if theta.device.type != "cpu" or self.version is None or changed is None:
            return None
        known = [support for support in changed if support is not None]
        if len(known) < len(changed) or sum(support.numel() for support in known) > _WORTH_IT * theta.numel():
            return None
        return known if self._rounded is None else [*known, self._rounded]

    def _from_changed(
        self, theta: torch.Tensor, image: torch.Tensor, spans: dict[int, slice], among: list[torch.Tensor]
    ) -> dict[int, Taken]:
        """Select in the tensors whose bound is known, as far as enough exceeds it."""
        bounded = [position for position in spans if position in self._bounds]
        if len(bounded) < len(spans):
            return {}
        ends = np.array([spans[position].stop for position in bounded], dtype=np.int64)
        bounds = np.array([self._bounds[position] for position in bounded], dtype=np.float32)
        kernels = kernels_for(theta)
        hits = [kernels.exceeding(theta, image, support, ends, bounds) for support in among]
        offsets = _sorted_distinct(hits)
        values = theta[offsets] - image[offsets]
        cuts = [0, *np.searchsorted(offsets.numpy(), ends).tolist()]
        found = {}
        for number, position in enumerate(bounded):
            part = slice(cuts[number], cuts[number + 1])
            taken = Taken(offsets[part], values[part])
            size = spans[position].stop - spans[position].start
            if size >= self.settings.dense_below:
                k = entries_for(size, self.settings.density)
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
            k = entries_for(a.numel(), self.settings.density)
            recall = self._recalls.setdefault(position, {})
            if a.numel() < self.settings.dense_below:
                pending[position] = take_all(Difference(a, b))
            elif device is not None:
                pending[position] = device.take_difference(a, b, k, recall)
            else:
                pending[position] = self.settings.selector(Difference(a, b), k, recall)
        found = {}
        for position, part in spans.items():
            taken = _collected(pending[position])
            small = part.stop - part.start < self.settings.dense_below
            self._bounds[position] = 0.0 if small or not taken.values.numel() else float(taken.values.abs().min())
            found[position] = Taken(taken.offsets + part.start, taken.values)
        return found


def _collected(taken: Taken | PendingTaken) -> Taken:
    if isinstance(taken, Taken):
        return taken
    taken.collect()
    return taken.on_device()


def _sorted_distinct(parts: list[torch.Tensor]) -> torch.Tensor:
    """Join ascending offsets into ascending offsets without repeats."""
    if len(parts) == 1:
        return parts[0]
    joined = np.sort(np.concatenate([part.numpy() for part in parts])) if parts else np.empty(0, np.int64)
    first = np.empty(joined.size, np.bool_)
    first[:1] = True
    np.not_equal(joined[1:], joined[:-1], out=first[1:])
    return torch.from_numpy(joined[first])

"""Selecting from the difference between a model and an image of it, tensor by tensor: the server's top-k reply."""

from typing import Any

import torch

from pscore.kernels import device_selection
from pscore.kernels.base import Taken
from pscore.kernels.device import PendingTaken
from pscore.layout import ModelLayout, Span
from pscore.selectors import Selector, entries_for
from pscore.selectors.base import nothing, take_all
from pscore.selectors.warm import warm
from pscore.sources import Difference

DEFAULT_DENSE_BELOW = 4096
"""Tensors with fewer elements (biases, norms) are sent whole: they cost little and matter much. 0 exempts nothing."""


def select_difference(
    a: torch.Tensor,
    b: torch.Tensor,
    layout: ModelLayout,
    span: Span,
    *,
    density: float,
    dense_below: int,
    selector: Selector,
    recalls: dict[int, dict[str, Any]],
) -> Taken:
    """Select from ``a − b`` over a span of the layout; offsets count from the span's start.

    A tensor that a shard border cuts is selected from by each shard for its own part.

    Args:
        a: fp32 ``[span.length]``.
        b: likewise.
        layout: the model's.
        span: which part of it.
        density: share of a tensor's entries that is taken.
        dense_below: tensors with fewer elements give every entry that is not zero.
        selector: takes about k entries.
        recalls: what the selector remembers of each tensor, by position; changed in place.
    """
    device = device_selection(a.device) if selector is warm else None
    found: list[tuple[int, Taken | PendingTaken]] = []
    for position, common in layout.overlapping(span):
        low, high = common.start - span.start, common.end - span.start
        source = Difference(a[low:high], b[low:high])
        k = entries_for(source.numel, density)
        recall = recalls.setdefault(position, {})
        if source.numel < dense_below:
            found.append((low, take_all(source)))
        elif device is not None:
            found.append((low, device.take_difference(a[low:high], b[low:high], k, recall)))
        else:
            found.append((low, selector(source, k, recall)))
    pieces = [(low, _collected(taken)) for low, taken in found]
    if not pieces:
        return nothing(a)
    return Taken(
        torch.cat([taken.offsets + low for low, taken in pieces]), torch.cat([taken.values for _, taken in pieces])
    )


def _collected(taken: Taken | PendingTaken) -> Taken:
    if isinstance(taken, Taken):
        return taken
    taken.collect()
    return taken.on_device()

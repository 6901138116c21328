"""Selecting from the difference between a model and an image of it, tensor by tensor: the server's top-k reply."""

import torch

from pscore.kernels.base import Taken
from pscore.layout import ModelLayout, Span
from pscore.selectors import Recall, Selector, entries_for
from pscore.selectors.base import nothing, take_all
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
    recalls: dict[int, Recall],
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
    offsets, values = [], []
    for position, common in layout.overlapping(span):
        low, high = common.start - span.start, common.end - span.start
        source = Difference(a[low:high], b[low:high])
        if source.numel < dense_below:
            taken = take_all(source)
        else:
            taken = selector(source, entries_for(source.numel, density), recalls.setdefault(position, {}))
        offsets.append(taken.offsets + low)
        values.append(taken.values)
    return Taken(torch.cat(offsets), torch.cat(values)) if offsets else nothing(a)

"""Select over a span of the flat layout, tensor by tensor; shared by the worker's push and the server's top-k reply."""

from collections.abc import Iterator

import torch

from pscore.layout import ModelLayout, Span
from pscore.selectors import Selector, entries_for

DEFAULT_DENSE_BELOW = 4096
"""Tensors with fewer elements (biases, norms) are sent whole: they cost little and matter much. 0 exempts nothing."""


def select(x: torch.Tensor, density: float, dense_below: int, selector: Selector) -> torch.Tensor:
    """Select from one flat tensor; one with fewer than ``dense_below`` elements gives every non-zero element."""
    k = x.numel() if x.numel() < dense_below else entries_for(x.numel(), density)
    return selector(x, k)


def select_span(
    x: torch.Tensor, layout: ModelLayout, span: Span, density: float, dense_below: int, selector: Selector
) -> torch.Tensor:
    """Select from ``x`` = ``span`` of the flat layout, each tensor by itself; offsets count from the span's start.

    A tensor that a shard border cuts is selected from by each shard for its own part.
    """

    def pieces() -> Iterator[torch.Tensor]:
        for _, common in layout.overlapping(span):
            low, high = common.start - span.start, common.end - span.start
            yield select(x[low:high], density, dense_below, selector) + low

    found = list(pieces())
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=x.device)

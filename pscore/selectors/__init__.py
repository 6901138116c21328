"""Selectors: which entries of a tensor are sent.

A selector is a function ``(x, k) -> offsets``: ``x`` is one-dimensional, floating point and finite; the result is
int64, strictly increasing, of at most ``k`` elements where |x| is largest, and never includes a zero: an all-zero
tensor gives an empty selection.
"""

from collections.abc import Callable

import torch

from pscore.selectors.exact import exact

Selector = Callable[[torch.Tensor, int], torch.Tensor]

SELECTORS: dict[str, Selector] = {"exact": exact}
"""Every selector by name."""


def entries_for(numel: int, density: float) -> int:
    """Return ``k = max(1, ⌊ρ·n⌋)`` (0 for an empty tensor): even a one-element tensor is updated."""
    return min(numel, max(1, int(density * numel)))

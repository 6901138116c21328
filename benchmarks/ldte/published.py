"""LDTE-BS as published, in plain torch, and the speedups that were published for it.

Laplacian distribution threshold estimation with binary search: were the entries Laplace distributed around zero with
scale ``b = mean|x|``, then ``k`` of ``n`` of them would exceed ``b·ln(n/k)``. That is the first threshold; from there
the interval from 0 to the largest magnitude is halved until the count is near enough to ``k``.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

SPEEDUPS = {"resnet101": 1.62, "densenet169": 1.18, "resnet50": 1.55, "densenet121": 1.12}
"""Of LDTE-BS over radix select, on a GPU, by model."""

TOLERANCE, MOST_HALVINGS = 0.1, 20


class Search(NamedTuple):
    """What the binary search came to.

    Attributes:
        threshold: the last one tried.
        first: entries above the first threshold, the estimate.
        count: entries above the last.
        passes: how often was counted.
    """

    threshold: float
    first: int
    count: int
    passes: int


def search(count_above: Callable[[float], int], mean: float, largest: float, n: int, k: int) -> Search:
    """Find a threshold that about ``k`` of ``n`` magnitudes exceed.

    Args:
        count_above: counts the magnitudes above a threshold: one pass over memory.
        mean: of the magnitudes.
        largest: of them.
        n: how many there are.
        k: how many should be above; fewer than ``n``.
    """
    low, high = 0.0, largest
    threshold = min(mean * math.log(n / k), largest)
    first = count = count_above(threshold)
    passes = 1
    while abs(count - k) > TOLERANCE * k and passes <= MOST_HALVINGS:
        low, high = (threshold, high) if count > k else (low, threshold)
        threshold = (low + high) / 2
        count = count_above(threshold)
        passes += 1
    return Search(threshold, first, count, passes)


def select(x: torch.Tensor, k: int) -> torch.Tensor:
    """Return the offsets of about ``k`` entries of greatest magnitude, as the paper's algorithm finds them."""
    magnitude = x.abs()
    found = search(
        lambda threshold: int(torch.count_nonzero(magnitude > threshold)),
        float(magnitude.mean()),
        float(magnitude.max()),
        x.numel(),
        k,
    )
    return (magnitude > found.threshold).nonzero().view(-1)


def radix_select(x: torch.Tensor, k: int) -> torch.Tensor:
    """Return the offsets of the ``k`` entries of greatest magnitude by ``torch.topk``: on a GPU, radix select."""
    return x.abs().topk(k, sorted=False).indices

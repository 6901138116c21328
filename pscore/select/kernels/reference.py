"""The selection kernels in plain torch operations, on any device.

They define the bits of the fast kernels, serve small tensors, and stand in where Triton is missing. Every product and
every sum is rounded by itself (no fused multiply-add), so that all backends agree.
"""

import functools
import logging

import numpy as np
import torch
from numpy.typing import NDArray

from pscore.select.kernels.base import GradientUpdate, Taken, ThresholdResult

log = logging.getLogger("pscore")


@functools.cache
def warn_that_it_stands_in(missing: str) -> None:
    """Warn, once a process, that these operations replace those of ``missing``."""
    log.warning("%s is not installed: entries are selected by plain torch operations, which is slower", missing)


def accumulate(memory: torch.Tensor, added: GradientUpdate) -> None:
    """Add ``added`` to ``memory``, in place, and bring its momentum up to date."""
    step = added.gradient.float() * added.scale
    if added.parameters is not None:
        step = step + added.parameters.float() * added.decay
    if added.momentum is not None:
        step = added.momentum.mul_(added.factor).add_(step)
    memory.add_(step)


def sift(x: torch.Tensor, threshold: float, capacity: int, turn: float = 0.0) -> Taken:
    """Return the entries with |x| > threshold, ascending.

    Args:
        x: fp32 ``[n]``.
        threshold: at least 0.
        capacity: how many may be returned. Where there are more, they are taken in order from a start, round the end.
        turn: that start, as a share of the entries found, in [0, 1).
    """
    offsets = (x.abs() > threshold).nonzero().view(-1)
    if offsets.numel() > capacity:
        window = (torch.arange(capacity, device=x.device) + _first(turn, offsets.numel())) % offsets.numel()
        offsets = offsets[window.sort().values]
    return Taken(offsets, x[offsets])


def take(
    memory: torch.Tensor, added: GradientUpdate | None, threshold: float, keep: float, capacity: int, turn: float = 0.0
) -> ThresholdResult:
    """Accumulate, sift, and leave ``keep·value`` in ``memory`` where an entry was taken."""
    if added is not None:
        accumulate(memory, added)
    taken = sift(memory, threshold, capacity, turn)
    found = ThresholdResult(taken, *count_above(memory, threshold))
    memory[taken.offsets] = taken.values * keep
    return found


def count_above(x: torch.Tensor, threshold: float) -> tuple[int, float]:
    """Return how many |x| lie above the threshold, and ``Σ(|x| − threshold)`` over them."""
    magnitude = x.abs()
    above = magnitude[magnitude > threshold]
    return above.numel(), float((above - threshold).sum(dtype=torch.float64))


def magnitude(x: torch.Tensor) -> tuple[float, float]:
    """Return sum and largest of |x|; zeros for an empty tensor."""
    absolute = x.abs()
    return float(absolute.sum(dtype=torch.float64)), float(absolute.max()) if x.numel() else 0.0


def take_difference(
    a: torch.Tensor, b: torch.Tensor, threshold: float, capacity: int, turn: float = 0.0
) -> ThresholdResult:
    """Sift ``a − b``; neither is changed."""
    x = a - b
    return ThresholdResult(sift(x, threshold, capacity, turn), *count_above(x, threshold))


def subtract_at(x: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
    """``x[offsets] −= values``."""
    x.index_add_(0, offsets, values, alpha=-1)


def exceeding(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, ends: NDArray[np.int64], bounds: NDArray[np.float32]
) -> torch.Tensor:
    """See :class:`~pscore.select.kernels.base.Kernels`."""
    offsets = offsets.long()
    tensors = torch.searchsorted(torch.from_numpy(ends), offsets, right=True)
    return offsets[(a[offsets] - b[offsets]).abs() > torch.from_numpy(bounds)[tensors]]


def _first(turn: float, found: int) -> int:
    """Return the rank at which filling starts, rounded as the kernels round it."""
    return min(int(torch.tensor(turn, dtype=torch.float32) * float(found)), found - 1)

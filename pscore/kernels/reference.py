"""The selection kernels in plain torch operations, on any device.

They say what the fast kernels compute, bit for bit, and stand in for them where Triton or numba is missing. Every
product and every sum is rounded by itself (no fused multiply-add), so that all backends agree.
"""

import functools
import logging

import torch

from pscore.kernels.base import Feed, Taken

log = logging.getLogger("pscore")


@functools.cache
def say_that_it_stands_in(missing: str) -> None:
    """Log, once a process, that these operations do the work of ``missing``'s."""
    log.warning("%s is not installed: entries are selected by plain torch operations, which is slower", missing)


def accumulate(memory: torch.Tensor, feed: Feed) -> None:
    """Add what ``feed`` says to ``memory``, in place, and bring its momentum up to date."""
    step = feed.gradient.float() * feed.scale
    if feed.parameters is not None:
        step = step + feed.parameters.float() * feed.decay
    if feed.momentum is not None:
        step = feed.momentum.mul_(feed.factor).add_(step)
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
    memory: torch.Tensor, feed: Feed | None, threshold: float, capacity: int, keep: float, turn: float = 0.0
) -> tuple[Taken, int]:
    """Accumulate, sift, and leave ``keep·value`` in ``memory`` (and 0 in the momentum) where an entry was taken.

    Returns:
        What was taken, and how many entries lie above the threshold: more than were taken if capacity was short.
    """
    if feed is not None:
        accumulate(memory, feed)
    above, _ = tail(memory, threshold)
    taken = sift(memory, threshold, capacity, turn)
    memory[taken.offsets] = taken.values * keep
    if feed is not None and feed.momentum is not None:
        feed.momentum[taken.offsets] = 0
    return taken, above


def tail(x: torch.Tensor, threshold: float) -> tuple[int, float]:
    """Return how many |x| lie above the threshold, and ``Σ(|x| − threshold)`` over them."""
    magnitude = x.abs()
    above = magnitude[magnitude > threshold]
    return above.numel(), float((above - threshold).sum())


def magnitude(x: torch.Tensor) -> tuple[float, float]:
    """Return the mean and the largest |x|; zeros for an empty tensor."""
    if not x.numel():
        return 0.0, 0.0
    absolute = x.abs()
    return float(absolute.mean()), float(absolute.max())


def sift_difference(a: torch.Tensor, b: torch.Tensor, threshold: float, capacity: int, turn: float = 0.0) -> Taken:
    """Sift ``a − b``."""
    return sift(a - b, threshold, capacity, turn)


def _first(turn: float, found: int) -> int:
    """Return the rank at which filling starts, rounded as the kernels round it."""
    return min(int(torch.tensor(turn, dtype=torch.float32) * float(found)), found - 1)

"""The kernels in plain torch operations: on any device, and what the others are tested against."""

import torch

from pscore.kernels.base import Feed, Sift, Taken


def feed(memory: torch.Tensor, added: Feed) -> None:
    """Accumulate: see :class:`~pscore.kernels.base.Feed`.

    Every product is rounded before it is added, as in the compiled loops, so that both give the same bits.
    """
    d = added.gradient.detach().float() * added.scale
    if added.decay and added.parameters is not None:
        d = d + added.parameters.detach().float() * added.decay
    if added.momentum is not None:
        d = d + added.momentum * added.factor
        added.momentum.copy_(d)
    memory.add_(d)


def take(memory: torch.Tensor, added: Feed | None, threshold: float, keep: float, capacity: int) -> Sift:
    """Accumulate, take out what is above the threshold, and leave ``keep`` of it behind."""
    if added is not None:
        feed(memory, added)
    sift = _sift(memory, threshold, capacity)
    memory[sift.taken.offsets] = sift.taken.values * keep
    return sift


def take_difference(a: torch.Tensor, b: torch.Tensor, threshold: float, capacity: int) -> Sift:
    """Copy out ``a − b`` where its magnitude is above the threshold."""
    return _sift(a - b, threshold, capacity)


def tail(x: torch.Tensor, threshold: float) -> tuple[int, float]:
    """Count the magnitudes above the threshold, and sum what they exceed it by."""
    excess = x.abs() - threshold
    above = excess[excess > 0]
    return above.numel(), float(above.double().sum())


def magnitude(x: torch.Tensor) -> tuple[float, float]:
    """Return mean and largest of ``|x|``; ``(0, 0)`` of nothing."""
    if not x.numel():
        return 0.0, 0.0
    magnitudes = x.abs()
    return float(magnitudes.mean(dtype=torch.float64)), float(magnitudes.max())


def _sift(x: torch.Tensor, threshold: float, capacity: int) -> Sift:
    offsets = (x.abs() > threshold).nonzero().view(-1)
    values = x[offsets]
    excess = float((values.abs() - threshold).double().sum())
    return Sift(Taken(offsets[:capacity], values[:capacity]), offsets.numel(), excess)

"""Normal and Laplace distributions fitted to numbers, and how far the numbers are from each.

The distance is Wasserstein-1: the area between two quantile functions, which is the area between the two distribution
functions, ``∫|F̂(x) − F(x)|dx``. It is computed without samples and without bins. Between the ``i``-th of the numbers
and the next, their own ``F̂`` is the constant ``i/n``; the fitted ``F`` has an antiderivative ``G`` in closed form and
crosses that constant at most once, at the quantile of ``i/n``. Left of all numbers ``F̂`` is 0 and right of them 1. So
each of these areas is a difference of ``G``, and the distance is their sum.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

_PIECE = 1 << 20  # elements at a time: fp64 copies of the whole would take gigabytes


@dataclass(frozen=True, slots=True)
class Fit(ABC):
    """A distribution that is symmetric around ``middle``; ``z`` below is ``(x − middle)/scale``."""

    name: ClassVar[str]
    middle: float
    scale: float

    @staticmethod
    @abstractmethod
    def below(z: torch.Tensor) -> torch.Tensor:
        """Return the distribution function ``F``."""

    @staticmethod
    @abstractmethod
    def area(z: torch.Tensor) -> torch.Tensor:
        """Return ``G``, the area under ``F`` from minus infinity."""

    @staticmethod
    @abstractmethod
    def quantile(u: torch.Tensor) -> torch.Tensor:
        """Return the inverse of ``F``."""


class Normal(Fit):
    """A normal distribution; its scale is the standard deviation."""

    name = "normal"

    @classmethod
    def of(cls, ordered: torch.Tensor) -> "Normal":
        """Fit to numbers: mean and standard deviation, the most likely ones."""
        variance, mean = torch.var_mean(ordered.double(), correction=0)
        return cls(float(mean), math.sqrt(float(variance)))

    @staticmethod
    def below(z: torch.Tensor) -> torch.Tensor:
        """See :class:`Fit`."""
        return torch.special.ndtr(z)

    @staticmethod
    def area(z: torch.Tensor) -> torch.Tensor:
        """See :class:`Fit`: ``z·Φ(z) + φ(z)``."""
        return z * torch.special.ndtr(z) + torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)

    @staticmethod
    def quantile(u: torch.Tensor) -> torch.Tensor:
        """See :class:`Fit`."""
        return torch.special.ndtri(u)


class Laplace(Fit):
    """A Laplace distribution, exponential on both sides; its scale is the mean distance from the middle."""

    name = "Laplace"

    @classmethod
    def of(cls, ordered: torch.Tensor) -> "Laplace":
        """Fit to numbers in ascending order: the median and the mean distance from it, the most likely ones."""
        n = ordered.numel()
        middle = 0.5 * (float(ordered[(n - 1) // 2]) + float(ordered[n // 2]))
        return cls(middle, float((ordered.double() - middle).abs().mean()))

    @staticmethod
    def below(z: torch.Tensor) -> torch.Tensor:
        """See :class:`Fit`."""
        tail = 0.5 * torch.exp(-z.abs())
        return torch.where(z < 0, tail, 1 - tail)

    @staticmethod
    def area(z: torch.Tensor) -> torch.Tensor:
        """See :class:`Fit`: ``eᶻ/2`` left of the middle, ``z + e⁻ᶻ/2`` right of it."""
        return z.clamp(min=0) + 0.5 * torch.exp(-z.abs())

    @staticmethod
    def quantile(u: torch.Tensor) -> torch.Tensor:
        """See :class:`Fit`."""
        return torch.where(u < 0.5, torch.log(2 * u), -torch.log(2 - 2 * u))


def wasserstein(ordered: torch.Tensor, fit: Fit) -> float:
    """Return the Wasserstein-1 distance of numbers, in ascending order, from a distribution of positive scale."""
    n = ordered.numel()
    ends = (ordered[[0, n - 1]].double() - fit.middle) / fit.scale
    total = float(fit.area(torch.stack([ends[0], -ends[1]])).sum())  # what lies outside of all numbers
    for start in range(0, n - 1, _PIECE):
        z = (ordered[start : start + _PIECE + 1].double() - fit.middle) / fit.scale
        left, right = z[:-1], z[1:]
        share = torch.arange(start + 1, start + z.numel(), dtype=torch.float64, device=z.device) / n
        areas, below = fit.area(z), fit.below(z)
        between = share * (right - left) - (areas[1:] - areas[:-1])
        total += float(between.abs().sum())
        crosses = ((below[:-1] < share) & (share < below[1:])).nonzero().view(-1)
        at = fit.quantile(share[crosses]).clamp(left[crosses], right[crosses])
        before = share[crosses] * (at - left[crosses]) - (fit.area(at) - areas[crosses])
        # |before| + |after| instead of |before + after|; the signs differ
        total += float(((2 * before - between[crosses]).abs() - between[crosses].abs()).sum())
    return total * fit.scale

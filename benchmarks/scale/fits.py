"""Costs as functions of what they grow with, and how they are found from measurements."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Line:
    """A cost with a fixed part and a part that grows.

    Attributes:
        fixed: seconds.
        each: seconds for each unit.
    """

    fixed: float = 0.0
    each: float = 0.0

    def __call__(self, units: float) -> float:
        return self.fixed + self.each * units

    def times(self, factor: float) -> "Line":
        """Return so many times the cost."""
        return Line(factor * self.fixed, factor * self.each)


@dataclass(frozen=True, slots=True)
class Curve:
    """A quantity by density, straight between measured points in the logarithm of the density.

    Attributes:
        densities: ascending.
        values: at these.
    """

    densities: tuple[float, ...]
    values: tuple[float, ...]

    def __call__(self, density: float) -> float:
        """Return the quantity; that of the nearest point beyond the ends."""
        return float(np.interp(np.log(max(density, 1e-12)), np.log(self.densities), self.values))


def line(points: Sequence[Sequence[float]]) -> Line:
    """Fit a line with no negative part to (units, seconds), every point with the same weight to its relative error.

    A third number is what the error is relative to: where seconds are a difference, what it was taken from.
    """
    units, seconds, scale = (np.array(column, dtype=float) for column in zip(*map(_scaled, points), strict=True))
    weight = 1 / np.maximum(scale, 1e-9)
    columns = np.stack([np.ones_like(units), units], axis=1) * weight[:, None]
    target = seconds * weight
    (fixed, each), *_ = np.linalg.lstsq(columns, target, rcond=None)
    if fixed < 0:
        fixed, each = 0.0, _alone(columns[:, 1], target)
    elif each < 0:
        fixed, each = _alone(columns[:, 0], target), 0.0
    return Line(max(0.0, float(fixed)), max(0.0, float(each)))


def worst(found: Line, points: Sequence[Sequence[float]]) -> float:
    """Return the largest relative distance of a measurement from a line."""
    return max(abs(found(units) - seconds) / max(scale, 1e-9) for units, seconds, scale in map(_scaled, points))


def serial_share(one: float, two: float, cores: int = 2) -> float:
    """Return the share of a work that no second thread can do meanwhile (Amdahl), from rates with one and two threads.

    Args:
        one: works a second of one thread.
        two: of two threads together.
        cores: that two threads have: with one core nothing is learnt, and the share is 1.
    """
    if cores < 2:
        return 1.0
    return min(1.0, max(0.0, 2 * one / two - 1))


def growing_share(work: Line, units: float, share: float) -> float:
    """Return the serial share of what grows of a work, from that of all of it: what is fixed is serial."""
    growing = work.each * units
    if growing <= 0:
        return 0.0
    return min(1.0, max(0.0, (share * work(units) - work.fixed) / growing))


def _scaled(point: Sequence[float]) -> tuple[float, float, float]:
    units, seconds, *scale = point
    return units, seconds, scale[0] if scale else seconds


def _alone(
    column: "np.ndarray[tuple[int], np.dtype[np.float64]]", target: "np.ndarray[tuple[int], np.dtype[np.float64]]"
) -> float:
    return float(column @ target / (column @ column))

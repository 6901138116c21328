"""Staleness: how it is counted, and how it scales an asynchronous update (docs/reference/protocol.md).

*Delay-adaptive steps*: with ``W`` workers a staleness of ``W − 1`` is normal, and beyond it ``η_τ = η·(W − 1)/τ``.
*Rescaled ASGD* (arXiv 2605.13434): a worker that pushes every ``T_i`` seconds gets ``η_i = η·T_i/mean(T)``, so that
fast workers do not bias the objective towards their data.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_LARGEST_FACTOR = 10.0  # a worker that pauses must not come back with an enormous step
_SMOOTHING = 0.1
_MOST_RUNS = 1024  # of a worker that others interrupt so often without a pull; beyond, its oldest count as others'


def smoothed(before: float, seconds: float) -> float:
    """Return a worker's mean time between pushes after one more (seconds; 0 before the first)."""
    return seconds if not before else before + _SMOOTHING * (seconds - before)


@dataclass(frozen=True, slots=True)
class OwnVersions:
    """The versions of a generation that a worker's own pushes have made since the base of the last one.

    ``runs`` has the first and last of neighbouring versions, ascending.
    """

    generation: int = 0
    runs: tuple[tuple[int, int], ...] = ()

    def since(self, generation: int, base: int) -> int:
        """Count those above a base version."""
        if generation != self.generation:
            return 0
        return sum(last - max(first - 1, base) for first, last in self.runs if last > base)

    def noted(self, generation: int, base: int, version: int) -> "OwnVersions":
        """Add a version, and drop those up to the base of its push: a later push has no older base."""
        runs = [(first, last) for first, last in self.runs if last > base] if generation == self.generation else []
        if runs and runs[-1][1] == version - 1:
            runs[-1] = (runs[-1][0], version)
        else:
            runs.append((version, version))
        return OwnVersions(generation, tuple(runs[-_MOST_RUNS:]))


@dataclass(frozen=True, slots=True)
class StalenessScaling:
    """Whether pushes are scaled by staleness (``adaptive``), and by their worker's speed."""

    adaptive: bool = False
    by_speed: bool = False

    @property
    def is_on(self) -> bool:
        """Whether anything is scaled; else a push need not read the other workers' intervals."""
        return self.adaptive or self.by_speed

    def factor(self, staleness: int, interval_seconds: float, intervals_seconds: Sequence[float]) -> float:
        """Return the factor of a push of staleness ``τ``; intervals between pushes are 0 if not known yet."""
        factor = 1.0
        if self.adaptive:
            factor *= min(1.0, max(1, len(intervals_seconds) - 1) / max(1, staleness))
        known = [seconds for seconds in intervals_seconds if seconds > 0]
        if self.by_speed and interval_seconds > 0 and known:
            factor *= min(_LARGEST_FACTOR, interval_seconds * len(known) / sum(known))
        return factor

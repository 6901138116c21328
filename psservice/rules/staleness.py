"""What staleness does to the size of an asynchronous update: a factor for each push, told to the worker and kept.

*Delay-adaptive steps* shrink what comes late: with ``W`` workers a staleness of ``W − 1`` is normal, and beyond it
``η_τ = η·(W − 1)/τ``. *Rescaled ASGD* (arXiv 2605.13434) shrinks what comes often: a worker that pushes every ``T_i``
seconds gets ``η_i = η·T_i/mean(T)``, so that fast workers do not bias the objective towards their data.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_LARGEST_FACTOR = 10.0  # a worker that pauses must not come back with an enormous step
_SMOOTHING = 0.1


def smoothed(before: float, seconds: float) -> float:
    """Return a worker's mean time between pushes after one more (seconds; 0 before the first)."""
    return seconds if not before else before + _SMOOTHING * (seconds - before)


@dataclass(frozen=True, slots=True)
class StalenessScaling:
    """How pushes are scaled.

    Attributes:
        adaptive: by their staleness.
        by_speed: by their worker's speed.
    """

    adaptive: bool = False
    by_speed: bool = False

    @property
    def is_on(self) -> bool:
        """Whether anything is scaled; else a push need not look at the other workers."""
        return self.adaptive or self.by_speed

    def factor(self, staleness: int, interval_seconds: float, intervals_seconds: Sequence[float]) -> float:
        """Return what a push is multiplied by.

        Args:
            staleness: ``τ`` of the push.
            interval_seconds: ``T_i`` of its worker; 0 where it is not known yet.
            intervals_seconds: ``T`` of every live worker, likewise; as many as there are workers.
        """
        factor = 1.0
        if self.adaptive:
            factor *= min(1.0, max(1, len(intervals_seconds) - 1) / max(1, staleness))
        known = [seconds for seconds in intervals_seconds if seconds > 0]
        if self.by_speed and interval_seconds > 0 and known:
            factor *= min(_LARGEST_FACTOR, interval_seconds * len(known) / sum(known))
        return factor

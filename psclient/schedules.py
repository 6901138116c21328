"""Density schedules, and learning-rate schedules that follow the server's version.

A density schedule is any function of the worker's step (from 1): ``density=lambda step: 0.1 if step < 100 else 0.01``.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from psclient.engine.mgs import LayerDensity
from psclient.errors import ConfigurationError
from psclient.node.optimizer import NodeOptimizer
from psclient.optim.base import ParameterServerOptimizer
from psclient.whole_numbers import whole_number

DensitySchedule = Callable[[int], float]

DGC_WARMUP = (0.25, 0.0625, 0.015625, 0.004)
"""Densities of the first four epochs of DGC's warm-up (Lin et al., section 3.3)."""


def dgc_warmup(steps_per_epoch: int, final: float = 0.001) -> DensitySchedule:
    """DGC's exponential warm-up: 25 %, 6.25 %, 1.5625 %, 0.4 % for an epoch each, then ``final``; never below it."""
    whole_number(steps_per_epoch, "steps_per_epoch must be a number of steps", 1)

    def density(step: int) -> float:
        epoch = (step - 1) // steps_per_epoch
        return max(DGC_WARMUP[epoch], final) if epoch < len(DGC_WARMUP) else final

    return density


def lags(lowest: float = 0.001, highest: float = 0.1, start: float = 0.01) -> LayerDensity:
    """A density for each layer, as large as hides behind backward (docs/internals/merging.md)."""
    return LayerDensity(lowest, highest, start)


@dataclass
class VersionClock:
    """Drives a ``torch.optim.lr_scheduler`` by the server's version instead of local steps.

    In a fleet that grows and shrinks, local steps are no measure of how far the training is; the version, the number of
    updates applied from all workers, is. Call :meth:`step` where ``scheduler.step()`` stood::

        clock = psclient.VersionClock(scheduler, optimizer, versions_per_step=steps_per_epoch * workers)

    A worker that saves its optimizer's state saves the clock's too. The optimizer's state has the rate as it was
    lowered by then, and a clock that begins anew would lower it again.

    Args:
        scheduler: any scheduler of ``torch.optim.lr_scheduler``.
        optimizer: the optimizer whose version is followed.
        versions_per_step: versions that make one step of the scheduler.
    """

    scheduler: Any
    optimizer: ParameterServerOptimizer | NodeOptimizer
    versions_per_step: int = 1
    steps: int = 0

    def __post_init__(self) -> None:
        if not hasattr(self.optimizer, "version") or not hasattr(self.scheduler, "step"):
            raise ConfigurationError(
                "VersionClock takes a scheduler and then one of psclient's optimizers: "
                f"VersionClock(scheduler, optimizer), not a {type(self.scheduler).__name__} and a "
                f"{type(self.optimizer).__name__}"
            )
        whole_number(self.versions_per_step, "versions_per_step must be a number of versions", 1)

    def step(self) -> None:
        """Step the scheduler as often as the version asks for; a late joiner catches up at once.

        The workers of a run may push more updates than a scheduler has steps, as ``OneCycleLR``: it stays at its end.
        """
        while self.steps < self.optimizer.version // self.versions_per_step and not _has_ended(self.scheduler):
            self.scheduler.step()
            self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state, its rates included, and how often the clock has stepped it."""
        return {"scheduler": self.scheduler.state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a clock was saved; before or after the optimizer's own state is loaded."""
        self.scheduler.load_state_dict(state_dict["scheduler"])
        self.steps = state_dict["steps"]
        for group, rate in zip(self.scheduler.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            group["lr"] = rate  # a scheduler that is made after the optimizer's state was loaded has changed it


def _has_ended(scheduler: Any) -> bool:
    """Tell whether a scheduler has all its steps behind it, and would raise an error at the next."""
    parts = getattr(scheduler, "_schedulers", ())
    if parts and hasattr(scheduler, "_milestones"):  # one after the other
        return _has_ended(parts[bisect_right(scheduler._milestones, scheduler.last_epoch + 1)])
    total = getattr(scheduler, "total_steps", None)
    return any(map(_has_ended, parts)) or (total is not None and scheduler.last_epoch >= total)

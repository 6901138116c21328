"""Checking hyper-parameters, and saying what the published runs used."""

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from psclient.errors import ConfigurationError

log = logging.getLogger("psclient")

_PUBLISHED_MOMENTUM = ((32, 0.3), (16, 0.45), (4, 0.7))
"""(workers, momentum) of the published asynchronous runs (DGS, ICPP 2020)."""


def check_hyperparameters(defaults: Mapping[str, Any]) -> None:
    """Raise :class:`ConfigurationError` where one is out of its range."""
    for name in ("lr", "momentum", "weight_decay", "density"):
        try:
            if isinstance(defaults.get(name), str):
                raise TypeError
            float(defaults.get(name, 0.0))
        except (TypeError, ValueError):
            raise ConfigurationError(f"{name} must be a number, not {defaults[name]!r}") from None
    for name, low, high in (("lr", 0.0, None), ("momentum", 0.0, 1.0), ("weight_decay", 0.0, None)):
        value = float(defaults.get(name, 0.0))
        if not low <= value < (high or math.inf):
            bound = f"at least {low:g} and " + (f"below {high:g}" if high else "finite")
            raise ConfigurationError(f"{name} must be {bound}, not {value}")
    if not 0 < float(defaults.get("density", 1.0)) <= 1:
        raise ConfigurationError(f"density must be above 0 and at most 1, not {defaults['density']}")


def needs_closure(kind: type[Optimizer]) -> bool:
    """Return whether an optimizer of torch's recomputes the loss within a step, as LBFGS does."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


class MomentumAdvice:
    """Warns, once for each step in the number of workers, where momentum is above what published runs used there.

    Asynchrony adds momentum of its own (Mitliagkas et al., 2016), so the published runs lower it as workers are added.
    """

    def __init__(self) -> None:
        self._warned_at = 0

    def check(self, workers: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Compare the largest momentum of the param groups with the published one."""
        momentum = max((float(group.get("momentum", 0)) for group in groups), default=0.0)
        bracket = next(((at, most) for at, most in _PUBLISHED_MOMENTUM if workers >= at), None)
        if bracket is None or bracket[0] <= self._warned_at or momentum <= bracket[1]:
            return
        self._warned_at = bracket[0]
        log.warning(
            "momentum %.2g with %d workers: asynchrony adds momentum of its own; published runs use %.2g from %d "
            "workers on. Tune it down if the loss is unsteady",
            momentum,
            workers,
            bracket[1],
            bracket[0],
        )

"""Checking hyper-parameters."""

import inspect
import math
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from psclient.errors import ConfigurationError


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

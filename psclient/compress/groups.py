"""Hyper-parameters: which param group each trained parameter belongs to now, and which values are allowed."""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from psclient.compress.method import Group
from psclient.errors import ConfigurationError
from pscore.select.kernels.segments import Integers

log = logging.getLogger("psclient")

_PUBLISHED_MOMENTUM, _PUBLISHED_FROM = 0.7, 4  # of the DGS paper, and the fewest workers of its asynchronous runs
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


class Rates(NamedTuple):
    """Learning rates of one push.

    Attributes:
        carried: that the pushed values carry; 1 where they are gradients.
        of_groups: at which the server's optimizer is to step each param group; empty where it has its own.
    """

    carried: float
    of_groups: tuple[float, ...] = ()


class ParamGroups:
    """An optimizer's param groups, by parameter; without a reference to the optimizer.

    ``own_density`` has the numbers of the groups that a density schedule leaves alone.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], own_density: Collection[int] = ()) -> None:
        self._own_density = own_density
        self.generation = 0  # counts the calls of assign()
        self._has_warned = False
        self.assign(groups)

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._numbers

    def assign(self, groups: Sequence[dict[str, Any]]) -> None:
        """Read the groups anew, after one was added or all were loaded."""
        self.all = groups
        self.generation += 1
        self._numbers = {id(parameter): number for number, group in enumerate(groups) for parameter in group["params"]}
        self._among: tuple[Sequence[torch.Tensor], Integers, list[int]] = (), np.zeros(0, np.int64), []

    def has_own_density(self, number: int) -> bool:
        """Tell whether a density schedule leaves this group alone."""
        return number in self._own_density

    def numbers_of(self, parameters: Sequence[torch.Tensor]) -> Integers:
        """Return the number of each parameter's group, int64 ``[n]``; -1 for one that is not trained."""
        return self._find(parameters)[1]

    def trained(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Return which of these parameters are trained and have elements, ascending."""
        return self._find(parameters)[2]

    def _find(self, parameters: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Integers, list[int]]:
        """Return what is known of parameters, which are looked up once until the groups are assigned anew."""
        if self._among[0] is not parameters:
            numbers = np.array([self._numbers.get(id(parameter), -1) for parameter in parameters])
            trained = [n for n in np.flatnonzero(numbers >= 0).tolist() if parameters[n].numel()]
            self._among = parameters, numbers, trained
        return self._among

    def values(self, number: int) -> Group:
        """Return a group's hyper-parameters as the schedulers left them."""
        return {**self.all[number], "lr": float(self.all[number].get("lr", 1.0))}

    def rates(self) -> Rates:
        """Return the rate that pushed values carry: that of the first group now."""
        return Rates(float(self.all[0]["lr"]))

    def set_density(self, density: float) -> None:
        """Set the density of every group that has none of its own; :class:`ConfigurationError` out of its range."""
        check_hyperparameters({"density": density})
        for number, group in enumerate(self.all):
            if number not in self._own_density:
                group["density"] = density

    @property
    def send_all(self) -> bool:
        """Whether the next push has every entry of every group."""
        return all(group["density"] >= 1 for group in self.all)

    def warn_of_momentum(self, workers: int) -> None:
        """Warn, once, where the momentum of several workers is above that of the DGS paper's runs.

        Asynchrony adds momentum of its own (Mitliagkas et al., 2016).
        """
        momentum = max((float(group.get("momentum", 0)) for group in self.all), default=0.0)
        if self._has_warned or workers < _PUBLISHED_FROM or momentum <= _PUBLISHED_MOMENTUM:
            return
        self._has_warned = True
        log.warning(
            "momentum %.2g with %d workers: asynchrony adds momentum of its own; the DGS paper uses 0.7 with 4 to 32 "
            "workers, and 0.45 on ImageNet with 16. Tune it down if the loss is unsteady",
            momentum,
            workers,
        )

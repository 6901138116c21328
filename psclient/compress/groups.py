"""Hyper-parameters: which param group each trained parameter belongs to now, and which values are allowed."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from psclient.compress.method import Group
from psclient.errors import HyperparameterError
from pscore.selection.rule import Integers

log = logging.getLogger("psclient")

_PUBLISHED_MOMENTUM, _PUBLISHED_FROM = 0.7, 4
"""Momentum and workers of the published asynchronous runs (DGS, ICPP 2020)."""

_LARGEST = float(np.finfo(np.float32).max)

_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "lr": ("at least 0 and finite in fp32", lambda value: 0 <= value <= _LARGEST),
    "momentum": ("at least 0 and below 1", lambda value: 0 <= value < 1),
    "weight_decay": ("at least 0 and finite in fp32", lambda value: 0 <= value <= _LARGEST),
    "density": ("above 0 and at most 1", lambda value: 0 < value <= 1),
    "decay": ("from 0 to 1", lambda value: 0 <= value <= 1),
}
"""What each hyper-parameter must be; NaN is in no range."""


def check_hyperparameters(values: Mapping[str, Any], group: int = -1) -> None:
    """Raise :class:`HyperparameterError` if one is out of its range; ``group`` is the number of their param group."""
    for name, (bound, is_inside) in _RANGES.items():
        if name not in values:
            continue
        value = values[name]
        try:
            number = None if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            number = None
        if number is None:
            raise HyperparameterError(name, value, "a number", group)
        if not is_inside(number):
            raise HyperparameterError(name, number, bound, group)


def check_inner(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise :class:`HyperparameterError` if a value of an inner optimizer's groups is NaN, or a rate not finite.

    Their ranges are the inner optimizer's own.
    """
    for number, group in enumerate(groups):
        for name, value in group.items():
            for each in value if isinstance(value, tuple | list) and name != "params" else (value,):
                if isinstance(each, torch.Tensor) and each.numel() != 1:
                    continue
                if isinstance(each, float | np.floating | torch.Tensor) and each != each:
                    raise HyperparameterError(name, value, "a number", number)
        for name in ("lr", "weight_decay"):
            if name in group and not abs(float(group[name])) <= _LARGEST:
                raise HyperparameterError(name, group[name], "finite in fp32", number)


class Rates(NamedTuple):
    """Learning rates of one push.

    Attributes:
        carried: that the pushed values carry; 1 if they are gradients.
        of_groups: at which the server's optimizer is to step each param group; empty if it has its own.
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
        self._values: tuple[Group, ...] = ()
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

    def read(self) -> None:
        """Read the hyper-parameters for one push, as the schedulers left them: what is set later is the next push's.

        Raises:
            HyperparameterError: one is out of its range; the values of the last push stay.
        """
        for number, group in enumerate(self.all):
            check_hyperparameters(group, number)
        self._values = tuple({**group, "lr": float(group.get("lr", 1.0))} for group in self.all)

    def assume(self, values: Sequence[Mapping[str, float]]) -> None:
        """Have these hyper-parameters, a mapping a group, which another rank has read for the push of both."""
        for group, told in zip(self.all, values, strict=True):
            group.update(told)
        self._values = tuple(dict(group) for group in self.all)

    def values(self, number: int) -> Group:
        """Return a group's hyper-parameters as :meth:`read` found them."""
        return self._values[number]

    def rates(self) -> Rates:
        """Return the rate that pushed values carry: that of the first group."""
        return Rates(self._values[0]["lr"])

    def set_density(self, density: float) -> None:
        """Set the density of every group that has none of its own; :class:`HyperparameterError` out of its range."""
        check_hyperparameters({"density": density})
        for number, group in enumerate(self.all):
            if number not in self._own_density:
                group["density"] = density

    @property
    def send_all(self) -> bool:
        """Whether the next push has every entry of every group."""
        return all(group["density"] >= 1 for group in self._values)

    def warn_of_momentum(self, workers: int) -> None:
        """Warn, once, if the momentum of several workers is above that of the DGS paper's runs.

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

"""Which param group each trained parameter belongs to now."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from psclient.compress.hyperparameters import check_hyperparameters
from psclient.compress.method import Group


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

    Args:
        groups: the optimizer's.
        own_density: the numbers of those that a density schedule leaves alone; read anew by :meth:`assign`.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], own_density: Collection[int] = ()) -> None:
        self._own_density = own_density
        self.assign(groups)

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._group_of

    def assign(self, groups: Sequence[dict[str, Any]]) -> None:
        """Read the groups anew, after one was added or all were loaded."""
        self.all = groups
        self._group_of = {id(parameter): group for group in groups for parameter in group["params"]}
        self._left_alone = {id(parameter) for number in self._own_density for parameter in groups[number]["params"]}

    def has_own_density(self, parameter: torch.Tensor) -> bool:
        """Tell whether a density schedule leaves this parameter's group alone."""
        return id(parameter) in self._left_alone

    def of(self, parameter: torch.Tensor) -> Group | None:
        """Return a parameter's hyper-parameters as the schedulers left them; ``None`` for one that is not trained."""
        group = self._group_of.get(id(parameter))
        return None if group is None else {**group, "lr": float(group.get("lr", 1.0))}

    def rates(self) -> Rates:
        """Return the rate that pushed values carry: that of the first group now."""
        return Rates(float(self.all[0]["lr"]))

    def set_density(self, density: float) -> None:
        """Give a density to every group that has none of its own.

        Raises:
            ConfigurationError: it is out of its range.
        """
        check_hyperparameters({"density": density})
        for number, group in enumerate(self.all):
            if number not in self._own_density:
                group["density"] = density

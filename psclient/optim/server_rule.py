"""Workers push sparse gradients, and a rule of the server's own steps the entries that were sent."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Unpack

from psclient.compress.groups import ParamGroups, Rates
from psclient.compress.method import Group, Recurrence
from psclient.engine.engine import GradientSource
from psclient.model.module import TrainedModel
from psclient.optim.arguments import Density, Options, Params, as_json
from psclient.optim.base import ParameterServerOptimizer
from psclient.optim.server_optimizer import ServerOptimizer, group_rates


def recurrence(group: Group) -> Recurrence:
    """``r += g + wd·θ``; at ρ = 1 all of ``r`` is sent."""
    return Recurrence(decay=group["weight_decay"], whole=group["density"] >= 1)


class ServerRule(ParameterServerOptimizer):
    """Base of the methods whose optimizer is a rule of the server's own; use one of its subclasses.

    Args:
        params: parameters or param groups.
        options: of the optimizer of torch's that the rule is named after; all workers must agree, but for ``lr``.
        weight_decay: L2 penalty, added to the gradient on the worker.
        density: ``ρ``; a number, or a function of the step.
        **connection: see :class:`~psclient.optim.base.ParameterServerOptimizer`.
    """

    _torch_name: ClassVar[str]

    def __init__(
        self,
        params: Params,
        options: Mapping[str, Any],
        weight_decay: float,
        density: Density | None,
        /,
        **connection: Unpack[Options],
    ) -> None:
        optimizer = as_json({"name": self._torch_name, "options": dict(options)}, "options")
        agreed = {"update": self._torch_name.lower(), "optimizer": optimizer}
        super().__init__(params, {"lr": options["lr"], "weight_decay": weight_decay}, density, agreed, **connection)

    def _agreed_settings(self) -> dict[str, str]:
        """Workers must agree on the groups and their first rates."""
        groups = [
            {"tensors": self._model.positions_of(group), "options": {"lr": float(group["lr"])}}
            for group in self.param_groups
        ]
        return super()._agreed_settings() | {"groups": as_json(groups, "param groups")}

    def _sources(self, model: TrainedModel, groups: ParamGroups) -> tuple[GradientSource, Callable[[], Rates]]:
        """Each group has a rate of its own."""
        return super()._sources(model, groups)[0], partial(group_rates, groups)

    _from_torch = ServerOptimizer._from_torch

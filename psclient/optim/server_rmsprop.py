"""ServerRMSprop: RMSprop on the server, for many asynchronous workers and sparse pushes."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from torch.optim.optimizer import ParamsT

from psclient.compress.groups import ParamGroups, Rates
from psclient.compress.method import Group, Recurrence
from psclient.engine.step import GradientSource
from psclient.model.module import TrainedModel
from psclient.optim.arguments import Density, as_json
from psclient.optim.base import ParameterServerOptimizer
from psclient.optim.server_optimizer import ServerOptimizer, group_rates


class ServerRMSprop(ParameterServerOptimizer):
    """RMSprop whose running squares are on the server, once for all workers; no momentum.

    Per tensor::

        r += g + wd·θ                                  # on every worker
        send s = Q(p) of p = top ρ of |r|;  r[sent] = 0
        server: v = α·v + (1 − α)·s²                   # absent entries are zeros
                θ −= lr·s / (√v + ε)

    The values are those of ``ServerOptimizer("RMSprop")``, at a cost of the entries that are sent and not of the model:
    the rest stays as it is, so that replies are sparse. Without momentum, because asynchrony adds some. The rate is
    each group's ``lr`` on the worker, and travels with each push: torch's schedulers work as usual.

    Args:
        params: parameters or param groups.
        lr: learning rate.
        alpha: ``α``, 0.5 to below 1; all workers must agree.
        eps: ``ε``, above 0; all workers must agree.
        weight_decay: L2 penalty, added to the gradient on the worker.
        density: ``ρ``; a number, or a function of the step.
        **connection: ``rounds=psclient.Rounds()`` for one step a round; see
            :class:`~psclient.optim.base.ParameterServerOptimizer`.

    Raises:
        RefusedError: ``alpha`` or ``eps`` is out of its range.
    """

    name: ClassVar[str] = "server_rmsprop"
    server_remembers = True
    groups_are_agreed: ClassVar[bool] = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        density: Density | None = None,
        **connection: Any,
    ) -> None:
        options = {"lr": lr, "alpha": alpha, "eps": eps}
        agreed = {"update": "rmsprop", "optimizer": as_json({"name": "RMSprop", "options": options}, "options")}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay}, density, agreed, **connection)

    def agreed_settings(self) -> dict[str, str]:
        """Workers must agree on the groups and their first rates."""
        groups = [
            {"tensors": self._model.positions_of(group), "options": {"lr": float(group["lr"])}}
            for group in self.param_groups
        ]
        return super().agreed_settings() | {"groups": as_json(groups, "param groups")}

    def sources(self, model: TrainedModel, groups: ParamGroups) -> tuple[GradientSource, Callable[[], Rates]]:
        """Each group has a rate of its own."""
        return super().sources(model, groups)[0], partial(group_rates, groups)

    _from_torch = ServerOptimizer._from_torch

    @staticmethod
    def recurrence(group: Group) -> Recurrence:
        """``r += g + wd·θ``; at ρ = 1 all of ``r`` is sent."""
        return Recurrence(decay=group["weight_decay"], whole=group["density"] >= 1)

"""SSGD: synchronous SGD over the live workers, dense or sparse."""

from typing import Unpack

from psclient.compress.method import Group, Method, Recurrence
from psclient.optim.arguments import Density, OverlapOptions, Params
from psclient.optim.base import ParameterServerOptimizer
from psclient.rounds import Rounds


def recurrence(group: Group) -> Recurrence:
    """``u = m·u + (g + wd·θ);  r += u``; at ρ = 1 all of ``lr·r`` is sent."""
    wd, m = group["weight_decay"], group["momentum"]
    return Recurrence(decay=wd, factor=m, unit=group["lr"], whole=group["density"] >= 1)


METHOD = Method("ssgd", recurrence, default_density=1.0, momentum_is_torchs=True)


class SSGD(ParameterServerOptimizer):
    """SSGD: each version of the model is one step with the mean of the live workers' updates.

    Per tensor, on every worker::

        u = m·u + (g + wd·θ);  r += u
        send s = Q(lr·p) of p = top ρ of |r|;  r[sent] = 0
        server: θ −= mean of s over those who contributed

    With ρ = 1 and everybody in time ``r`` is empty after each step, and the whole is SGD with momentum on the batches
    of all workers together. What does not arrive, an update that is late for its round or a quantisation error, comes
    back as ``r += s/lr``.

    Args:
        params: parameters or param groups.
        lr: learning rate.
        momentum: ``m``.
        weight_decay: L2 penalty, added to the gradient.
        density: ``ρ``; a number, or a function of the step.
        rounds: when a round closes; by default with the update of the last live worker.
        **connection: see :class:`~psclient.optim.base.ParameterServerOptimizer`.
    """

    _method = METHOD

    def __init__(
        self,
        params: Params,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        density: Density | None = None,
        rounds: Rounds | None = None,
        **connection: Unpack[OverlapOptions],
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, density, rounds=rounds or Rounds(), **connection)

"""ASGD: asynchronous stochastic gradient descent with dense pushes, the baseline of every sparse method."""

from typing import Unpack

import torch

from psclient.compress.method import Group, Method, Recurrence, State
from psclient.optim.arguments import Options, Params
from psclient.optim.base import ParameterServerOptimizer


def recurrence(group: Group) -> Recurrence:
    """``u = m·u + (g + wd·θ);  d = lr·u``, plus the residual of earlier pushes."""
    return Recurrence(decay=group["weight_decay"], factor=group["momentum"], rate=group["lr"], whole=True)


METHOD = Method("asgd", recurrence, default_density=1.0, sends_all=True, momentum_is_torchs=True)


def reference_step(state: State, g: torch.Tensor, lr: float, m: float, density: float) -> torch.Tensor:
    """Return what one step sends: SGD's step with local momentum, of every entry."""
    state["u"] = m * state.get("u", 0) + g
    sent: torch.Tensor = lr * state["u"]
    return sent


class ASGD(ParameterServerOptimizer):
    """ASGD: every element of every gradient is sent; the server subtracts it on arrival.

    Asynchronous SGD, and not the averaged SGD that ``torch.optim.ASGD`` is.

    Per tensor::

        u = m·u + (g + wd·θ)                 # m = 0: u = g + wd·θ
        send d = lr·u

    A refused push and a quantisation error are added to the next push.

    Args:
        params: parameters or param groups.
        lr: learning rate.
        momentum: local momentum ``m``.
        weight_decay: L2 penalty, added to the gradient.
        **connection: see :class:`~psclient.optim.base.ParameterServerOptimizer`.
    """

    _method = METHOD

    def __init__(
        self, params: Params, lr: float, momentum: float = 0.0, weight_decay: float = 0.0, **connection: Unpack[Options]
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, None, **connection)

"""ASGD: asynchronous stochastic gradient descent with dense pushes, the baseline of every sparse method."""

from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from psclient.methods.base import Group, Sent, State, Tools, held_entries, memory
from psclient.optimizer import ParameterServerOptimizer


class ASGD(ParameterServerOptimizer):
    """ASGD: every element of every gradient is sent; the server subtracts it on arrival.

    Per tensor::

        u = m·u + (g + wd·θ)                 # m = 0: u = g + wd·θ
        send d = lr·u

    Refused pushes and what quantisation loses are carried to the next push.

    Args:
        params: parameters or param groups.
        lr: learning rate.
        momentum: local momentum ``m``.
        weight_decay: L2 penalty, added to the gradient.
        **connection: see :class:`~psclient.optimizer.ParameterServerOptimizer`.
    """

    name: ClassVar[str] = "asgd"

    def __init__(
        self, params: ParamsT, lr: float, momentum: float = 0.0, weight_decay: float = 0.0, **connection: Any
    ) -> None:
        """Join the server; see the class."""
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, 1.0, **connection)

    @staticmethod
    def compress(state: State, gradient: torch.Tensor, group: Group, tools: Tools) -> Sent:
        """One step."""
        u = gradient
        if group["momentum"]:
            u = memory(state, "momentum", gradient).mul_(group["momentum"]).add_(gradient)
        d = group["lr"] * u
        if "carry" in state:
            d.add_(state["carry"])
        s = tools.quantise(d)
        if s is d:
            state.pop("carry", None)
        else:
            state["carry"] = d - s
        return Sent(None, s)

    @staticmethod
    def give_back(state: State, payload: torch.Tensor, group: Group) -> None:
        """Carry the payload to the next push."""
        memory(state, "carry", payload).add_(payload)

    @staticmethod
    def flush_state(state: State, group: Group, tools: Tools) -> Sent:
        """Send what is carried."""
        carry = state.get("carry")
        held = held_entries(carry)
        if carry is None:
            return Sent(held, torch.empty(0))
        s = tools.quantise(carry[held])
        carry[held] -= s
        return Sent(held, s)

"""Gradient Dropping (Aji and Heafield, EMNLP 2017)."""

from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from psclient.methods.base import Group, Sent, State, Tools, held_entries, memory
from psclient.optimizer import Density, ParameterServerOptimizer


class GradientDropping(ParameterServerOptimizer):
    """Gradient Dropping: what is not sent stays in a residual; no momentum.

    Per tensor::

        r += lr·(g + wd·θ)
        s  = Q(top ρ of |r|);  send s
        r[sent] −= s

    A refused push comes back whole: ``Σ lr·g = Σ applied + r``.

    Args:
        params: parameters or param groups.
        lr: learning rate.
        weight_decay: L2 penalty, added to the gradient.
        density: ``ρ``; a number, or a function of the step.
        **connection: see :class:`~psclient.optimizer.ParameterServerOptimizer`.
    """

    name: ClassVar[str] = "gradient_dropping"

    def __init__(
        self, params: ParamsT, lr: float, weight_decay: float = 0.0, density: Density = 0.01, **connection: Any
    ) -> None:
        """Join the server; see the class."""
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay}, density, **connection)

    @staticmethod
    def compress(state: State, gradient: torch.Tensor, group: Group, tools: Tools) -> Sent:
        """One step of the recurrence."""
        r = memory(state, "residual", gradient)
        r.add_(gradient, alpha=group["lr"])
        return _send(r, tools.choose(r), tools)

    @staticmethod
    def give_back(state: State, payload: torch.Tensor, group: Group) -> None:
        """``r += p``."""
        memory(state, "residual", payload).add_(payload)

    @staticmethod
    def flush_state(state: State, group: Group, tools: Tools) -> Sent:
        """Send the whole residual."""
        r = state.get("residual")
        held = held_entries(r)
        return Sent(held, torch.empty(0)) if r is None else _send(r, held, tools)


def _send(r: torch.Tensor, sent: torch.Tensor, tools: Tools) -> Sent:
    s = tools.quantise(r[sent])
    r[sent] -= s
    return Sent(sent, s)

"""Gradient Dropping (Aji and Heafield, EMNLP 2017)."""

from typing import Unpack

import torch

from psclient.compress.method import Group, Method, Recurrence, State, top
from psclient.optim.arguments import Density, Options, Params
from psclient.optim.base import ParameterServerOptimizer


def recurrence(group: Group) -> Recurrence:
    """``r += lr·(g + wd·θ)``."""
    lr, wd = group["lr"], group["weight_decay"]
    return Recurrence(scale=lr, decay=lr * wd)


METHOD = Method("gradient_dropping", recurrence)


def reference_step(state: State, g: torch.Tensor, lr: float, m: float, density: float) -> torch.Tensor:
    """Return what one step sends, as published; there is no momentum."""
    r = state.get("r", 0) + lr * g
    chosen = top(r, density)
    state["r"] = torch.where(chosen, 0, r)
    return torch.where(chosen, r, 0)


class GradientDropping(ParameterServerOptimizer):
    """Gradient Dropping: unsent values stay in a residual; no momentum.

    Per tensor::

        r += lr·(g + wd·θ)
        send s = Q(p) of p = top ρ of |r|
        r[sent] = 0

    What does not arrive, a refused push or a quantisation error, comes back whole: ``Σ lr·g = Σ applied + r``.

    Args:
        params: parameters or param groups.
        lr: learning rate.
        weight_decay: L2 penalty, added to the gradient.
        density: ``ρ``; a number, or a function of the step.
        **connection: see :class:`~psclient.optim.base.ParameterServerOptimizer`.
    """

    _method = METHOD

    def __init__(
        self,
        params: Params,
        lr: float,
        weight_decay: float = 0.0,
        density: Density | None = None,
        **connection: Unpack[Options],
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay}, density, **connection)

"""DGS: dual-way gradient sparsification with sparsification-aware momentum (Yan et al., ICPP 2020)."""

from typing import Unpack

import torch

from psclient.compress.method import Group, Method, Recurrence, State, top
from psclient.optim.arguments import Density, Options, Params
from psclient.optim.base import ParameterServerOptimizer


def recurrence(group: Group) -> Recurrence:
    """``r += lr·(g + wd·θ)``; ``m`` times the sent entry remains, also after a flush."""
    lr, wd, m = group["lr"], group["weight_decay"], group["momentum"]
    return Recurrence(scale=lr, decay=lr * wd, keep=m)


METHOD = Method("dgs", recurrence)


def reference_step(state: State, g: torch.Tensor, lr: float, m: float, density: float) -> torch.Tensor:
    """Return what one step sends, as published: an unsent entry is divided by ``m``, so that it does not decay."""
    u = m * state.get("u", 0) + lr * g
    chosen = top(u, density)
    state["u"] = torch.where(chosen, u, u / m)
    return torch.where(chosen, u, 0)


class DGS(ParameterServerOptimizer):
    """DGS: the worker's residual is momentum and memory at once, and both ways are sparse.

    Per tensor, with residual ``r`` (the paper's ``u``, kept as ``m·u`` after each send; same recurrence, no division)::

        r += lr·(g + wd·θ)
        send s = Q(p) of p = top ρ of |r|
        r[sent] = m·p

    What does not arrive, a refused push ``p`` or a quantisation error ``p − s``, comes back as ``r += (1 − m)·p`` with
    the ``m`` of that push, so that at every moment ``Σ lr·g = Σ (1 − m)·applied + r``.

    With several workers, compute gradients where the model will be once the residual has arrived; that costs no bytes
    and trains better (docs/evidence/accuracy.md)::

        with optimizer.lookahead():
            loss_function(model(x), y).backward()
        optimizer.step()

    Args:
        params: parameters or param groups, as for any ``torch.optim`` optimizer.
        lr: learning rate.
        momentum: ``m``. Asynchrony adds momentum of its own: the paper uses 0.7 with 4 to 32 workers, and 0.45 on
            ImageNet with 16; a warning says so if more is used. The rate is inside this momentum, as in the paper:
            after a drop of the rate it is not SGD with momentum.
        weight_decay: L2 penalty, added to the gradient.
        density: ``ρ``, the share of a tensor's entries that is sent; a number, or a function of the step.
        **connection: ``server``, ``model``, ``worker``, ``settings``: see
            :class:`~psclient.optim.base.ParameterServerOptimizer`.
    """

    _method = METHOD

    def __init__(
        self,
        params: Params,
        lr: float,
        momentum: float = 0.7,
        weight_decay: float = 0.0,
        density: Density | None = None,
        **connection: Unpack[Options],
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}, density, **connection)

"""DGS: dual-way gradient sparsification with sparsification-aware momentum (Yan et al., ICPP 2020)."""

from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from psclient.methods.base import Group, Sent, State, Tools, held_entries, memory
from psclient.optimizer import Density, ParameterServerOptimizer


class DGS(ParameterServerOptimizer):
    """DGS: the worker's residual is momentum and memory at once, and both ways are sparse.

    Per tensor, with residual ``r`` (the paper's ``u``, kept as ``m·u`` after each send; same recurrence, no division)::

        r += lr·(g + wd·θ)
        s  = Q(top ρ of |r|);  send s
        r[sent] = (r − s) + m·s

    A refused push ``p`` comes back as ``r += (1 − m)·p``, so that at every moment
    ``Σ lr·g = (1 − m)·Σ applied + r``.

    Args:
        params: parameters or param groups, as for any ``torch.optim`` optimizer.
        lr: learning rate.
        momentum: ``m``. Asynchrony adds momentum of its own: the published runs use 0.7 at 4 workers, 0.45 at 16 and
            0.3 at 32, and a warning says so where more is used.
        weight_decay: L2 penalty, added to the gradient.
        density: ``ρ``, the share of a tensor's entries that is sent; a number, or a function of the step.
        **connection: ``server``, ``model``, ``worker``, ``settings``: see
            :class:`~psclient.optimizer.ParameterServerOptimizer`.
    """

    name: ClassVar[str] = "dgs"

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.7,
        weight_decay: float = 0.0,
        density: Density = 0.01,
        **connection: Any,
    ) -> None:
        """Join the server; see the class."""
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, density, **connection)

    @staticmethod
    def compress(state: State, gradient: torch.Tensor, group: Group, tools: Tools) -> Sent:
        """One step of the recurrence."""
        r = memory(state, "residual", gradient)
        r.add_(gradient, alpha=group["lr"])
        sent = tools.choose(r)
        return _send(r, sent, group["momentum"], tools)

    @staticmethod
    def give_back(state: State, payload: torch.Tensor, group: Group) -> None:
        """``r += (1 − m)·p``."""
        memory(state, "residual", payload).add_(payload, alpha=1 - group["momentum"])

    @staticmethod
    def flush_state(state: State, group: Group, tools: Tools) -> Sent:
        """One step with no gradient and ρ = 1: everything held is sent."""
        r = state.get("residual")
        held = held_entries(r)
        return Sent(held, torch.empty(0)) if r is None else _send(r, held, group["momentum"], tools)


def _send(r: torch.Tensor, sent: torch.Tensor, m: float, tools: Tools) -> Sent:
    held = r[sent]
    s = tools.quantise(held)
    r[sent] = (held - s) + m * s
    return Sent(sent, s)

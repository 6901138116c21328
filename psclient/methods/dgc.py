"""DGC: Deep Gradient Compression (Lin et al., ICLR 2018)."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT

from psclient.methods.base import Group, Sent, State, Tools, held_entries, memory
from psclient.optimizer import Density, ParameterServerOptimizer


class DGC(ParameterServerOptimizer):
    """DGC: momentum correction, momentum factor masking, local gradient clipping, density warm-up.

    Per tensor::

        g ← g·min(1, (clip/√W) / ‖all g‖)            # local clipping (section 3.2), W = live workers
        u = m·u + (g + wd·θ);  r += u                # momentum correction (equation 4)
        send s = Q(lr·r[top ρ of |r|])
        r[sent] −= s/lr;  u[sent] = 0                # factor masking (equation 8)

    For the paper's warm-up pass ``density=psclient.schedules.dgc_warmup(steps_per_epoch)``.

    Args:
        params: parameters or param groups.
        lr: learning rate.
        momentum: ``m``.
        weight_decay: L2 penalty, added to the clipped gradient.
        density: ``ρ``; a number, or a function of the step.
        clip_norm: ``clip``, the bound on the norm of the whole gradient summed over workers; ``None`` for no clipping.
        **connection: see :class:`~psclient.optimizer.ParameterServerOptimizer`.
    """

    name: ClassVar[str] = "dgc"

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        density: Density = 0.001,
        clip_norm: float | None = None,
        **connection: Any,
    ) -> None:
        """Join the server; see the class."""
        self.clip_norm = clip_norm
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, density, **connection)

    def agreed_settings(self) -> dict[str, str]:
        """Workers must agree on the clipping too."""
        return {**super().agreed_settings(), "clip_norm": str(self.clip_norm)}

    def gradient_scale(self, gradients: Sequence[torch.Tensor], live_workers: int) -> float:
        """Return the factor of the local clipping."""
        if self.clip_norm is None:
            return 1.0
        norm = math.sqrt(sum(float(torch.linalg.vector_norm(g.float())) ** 2 for g in gradients))
        bound = self.clip_norm / math.sqrt(max(1, live_workers))
        return min(1.0, bound / norm) if norm > 0 else 1.0

    @staticmethod
    def compress(state: State, gradient: torch.Tensor, group: Group, tools: Tools) -> Sent:
        """One step of the recurrence."""
        u, r = memory(state, "momentum", gradient), memory(state, "residual", gradient)
        u.mul_(group["momentum"]).add_(gradient)
        r.add_(u)
        sent = tools.choose(r)
        u[sent] = 0
        return _send(state, r, sent, group["lr"], tools)

    @staticmethod
    def give_back(state: State, payload: torch.Tensor, group: Group) -> None:
        """``r += p/lr``, with the rate at which it was sent; where that was zero, so was the payload."""
        lr = state.get("sent_lr", group["lr"])
        if lr:
            memory(state, "residual", payload).add_(payload, alpha=1 / lr)

    @staticmethod
    def flush_state(state: State, group: Group, tools: Tools) -> Sent:
        """Send the whole residual; the momentum that is left would be new movement and stays unsent."""
        r = state.get("residual")
        held = held_entries(r)
        return Sent(held, torch.empty(0)) if r is None else _send(state, r, held, group["lr"], tools)


def _send(state: State, r: torch.Tensor, sent: torch.Tensor, lr: float, tools: Tools) -> Sent:
    state["sent_lr"] = lr
    scaled = lr * r[sent]
    s = tools.quantise(scaled)
    r[sent] = (scaled - s) / lr if lr else 0.0
    return Sent(sent, s)

"""DGC: Deep Gradient Compression (Lin et al., ICLR 2018)."""

import math
from collections.abc import Sequence
from typing import Unpack

import torch

from psclient.compress.gradients import Scale, norms
from psclient.compress.method import Group, Method, Recurrence, State, top
from psclient.errors import ConfigurationError, HyperparameterError
from psclient.optim.arguments import Density, Options, Params
from psclient.optim.base import ParameterServerOptimizer


def recurrence(group: Group) -> Recurrence:
    """``u = m·u + (g + wd·θ);  r += u``; both are cleared if an entry is selected.

    A flush leaves the momentum: that would be new movement.
    """
    return Recurrence(decay=group["weight_decay"], factor=group["momentum"], unit=group["lr"], masks_momentum=True)


METHOD = Method("dgc", recurrence, default_density=0.001)


def reference_step(state: State, g: torch.Tensor, lr: float, m: float, density: float) -> torch.Tensor:
    """Return what one step sends, as published: momentum correction, then factor masking."""
    u = m * state.get("u", 0) + g
    v = state.get("v", 0) + u
    chosen = top(v, density)
    state["u"], state["v"] = torch.where(chosen, 0, u), torch.where(chosen, 0, v)
    return lr * torch.where(chosen, v, 0)


class DGC(ParameterServerOptimizer):
    """DGC: momentum correction, momentum factor masking, local gradient clipping, density warm-up.

    Per tensor::

        g ← g·min(1, (clip/√W) / ‖all g‖)            # local clipping (section 3.2), W = live workers
        u = m·u + (g + wd·θ);  r += u                # momentum correction (equation 4)
        send s = Q(lr·p) of p = top ρ of |r|
        r[sent] = 0;  u[sent] = 0                    # factor masking (equation 8)

    Tensors below ``dense_below`` elements are sent whole and keep their momentum, as in the reference implementation.
    What does not arrive, a refused push or a quantisation error, comes back as ``r += s/lr``.

    For the paper's warm-up pass ``density=psclient.schedules.dgc_warmup(steps_per_epoch)``.

    Args:
        params: parameters or param groups.
        lr: learning rate.
        momentum: ``m``.
        weight_decay: L2 penalty, added to the clipped gradient.
        density: ``ρ``; a number, or a function of the step.
        clip_norm: ``clip``, the bound on the norm of the whole gradient summed over workers; ``None`` for no clipping.
            ``W`` is the number of live workers in the last answer that this worker has had, and so a step old.
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
        clip_norm: float | None = None,
        **connection: Unpack[Options],
    ) -> None:
        if clip_norm is not None and connection.get("overlap"):
            raise ConfigurationError(
                "clip_norm needs the norm of the whole gradient, and overlap=True sends its first part before the last "
                "is known; leave one of them out"
            )
        self.clip_norm = clip_norm
        _check_clip_norm(clip_norm)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, density, {"clip_norm": str(clip_norm)}, **connection)

    def _gradient_scale(self, gradients: Sequence[torch.Tensor], live_workers: int) -> Scale:
        """``min(1, (clip/√W) / ‖all g‖)``."""
        if self.clip_norm is None:
            return 1.0
        _check_clip_norm(self.clip_norm)
        bound = self.clip_norm / math.sqrt(max(1, live_workers))
        scale: torch.Tensor = bound / norms(gradients).double().norm()
        return scale.clamp(max=1.0)


def _check_clip_norm(clip_norm: float | None) -> None:
    if clip_norm is not None and not clip_norm > 0:
        raise HyperparameterError("clip_norm", clip_norm, "above 0, or None")

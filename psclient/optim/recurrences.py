"""Formulas that several methods share: weight decay, local momentum, and sending a tensor whole."""

import torch

from psclient.compress.method import DenseUpdate, Group, ResidualUpdate, State, TensorGradient, memory
from pscore.select.kernels.base import GradientUpdate


def with_decay(group: Group, step: TensorGradient) -> torch.Tensor:
    """Return ``g + wd·θ`` in fp32; the step's own gradient where that is the same."""
    g = step.gradient.float()
    return g if step.parameters is None else g.add(step.parameters.float(), alpha=group["weight_decay"])


def local_momentum(state: State, group: Group, g: torch.Tensor) -> torch.Tensor:
    """Return ``u = m·u + g``, which is the state's memory; ``g`` itself at ``m = 0``."""
    m = group["momentum"]
    return memory(state, "momentum", g).mul_(m).add_(g) if m else g


def momentum_corrected(state: State, group: Group, step: TensorGradient) -> ResidualUpdate:
    """Send the top ρ of ``lr·|r|`` after ``u = m·u + (g + wd·θ);  r += u`` (DGC, equation 4)."""
    u, r = memory(state, "momentum", step.gradient), memory(state, "residual", step.gradient)
    wd, m = group["weight_decay"], group["momentum"]
    added = GradientUpdate(step.gradient, 1.0, step.parameters, wd, momentum=u, factor=m)
    return ResidualUpdate(r, added, unit=group["lr"])


def send_whole(state: State, d: torch.Tensor, rate: float = 1.0) -> DenseUpdate:
    """Send ``rate·d`` whole, with what earlier pushes left in the residual."""
    sent = rate * d
    return DenseUpdate(sent.add_(state.pop("residual")) if "residual" in state else sent)


def send_top(state: State, group: Group, d: torch.Tensor, rate: float = 1.0) -> ResidualUpdate | DenseUpdate:
    """Send the top ρ of ``|r|`` after ``r += rate·d``; at ρ = 1 all of ``r``."""
    if group["density"] < 1:
        return ResidualUpdate(memory(state, "residual", d), GradientUpdate(d, rate))
    return send_whole(state, d.float(), rate)

"""What a training method defines: a recurrence, whose coefficients depend on a param group's hyper-parameters.

A method knows neither tensors nor selection nor RPC: :mod:`psclient.compress.selector` carries the recurrence out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

State = dict[str, Any]
"""The optimizer's own ``state[parameter]``: ``residual``, ``momentum`` (fp32 ``[n]``), and a selector's memory."""

Group = Mapping[str, Any]
"""A param group: ``lr``, ``momentum``, … as the schedulers left them."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """What a step does to a tensor with gradient ``g``, parameters ``θ``, momentum ``u`` and residual ``r``.

    ::

        d = scale·g + decay·θ
        u = factor·u + d                         # factor 0: u = d, and no memory
        r = retain·r + rate·u
        send unit·p of p = top ρ of |r|          # whole: unit·r
        r[sent] = keep·p
        u[sent] = 0                              # masks_momentum; not if a tensor is sent for being small
    """

    scale: float = 1.0
    decay: float = 0.0
    factor: float = 0.0
    retain: float = 1.0
    rate: float = 1.0
    unit: float = 1.0
    keep: float = 0.0
    masks_momentum: bool = False
    whole: bool = False

    @property
    def share(self) -> float:
        """The factor of a sent value that did not arrive and returns to the residual; 0 if nothing was sent."""
        return (1 - self.keep) / self.unit if self.unit else 0.0


@dataclass(frozen=True, slots=True)
class Method:
    """One training method.

    Attributes:
        name: by which workers agree, and which saved states have.
        recurrence: returns the recurrence at a param group's hyper-parameters. A flush is a step without a gradient,
            and sends all of ``r``.
        default_density: if neither a density nor a budget is given; below 1 only with a value type of the user's
            choice, else a budget holds.
        sends_all: whether every push has all entries.
        asynchronous: whether all workers' updates meet in one model one by one, which adds momentum of its own.
        momentum_is_torchs: whether ``state[parameter]["momentum"]`` is what ``torch.optim.SGD`` keeps as
            ``momentum_buffer``.
        server_remembers: whether the server's optimizer has a state, which no state dict of a worker contains.
        groups_are_agreed: whether the server's optimizer has the param groups, too.
    """

    name: str
    recurrence: Callable[[Group], Recurrence]
    default_density: float = 0.01
    sends_all: bool = False
    asynchronous: bool = True
    momentum_is_torchs: bool = False
    server_remembers: bool = False
    groups_are_agreed: bool = False


def top(x: torch.Tensor, density: float) -> torch.Tensor:
    """Mark the share ``ρ`` of entries of greatest magnitude, one at least: as the papers select."""
    k = min(x.numel(), max(1, int(density * x.numel())))
    return torch.zeros_like(x, dtype=torch.bool).index_fill_(0, x.abs().topk(k).indices, True)

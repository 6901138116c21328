"""What a training method defines: a recurrence, whose coefficients depend on a param group's hyper-parameters.

A method knows neither tensors nor selection nor RPC: :mod:`psclient.compress.compressor` carries the recurrence out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

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
        u[sent] = 0                              # masks_momentum; not where a tensor is sent for being small
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
        """The factor of a sent value that did not arrive and returns to the residual; 0 where nothing was sent."""
        return (1 - self.keep) / self.unit if self.unit else 0.0


class Method(Protocol):
    """One training method."""

    name: ClassVar[str]

    @staticmethod
    def recurrence(group: Group) -> Recurrence:
        """Return the recurrence at a param group's hyper-parameters of now.

        A flush is a step without a gradient that sends all of ``r``.
        """

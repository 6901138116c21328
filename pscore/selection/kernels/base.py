"""The interface of the selection kernels. All tensors are flat and contiguous; a *memory* is an fp32 residual ``r``.

NaN is above every threshold: it is taken before anything else, and whoever takes it sees that it is not finite. A NaN
that no threshold caught would stay in a memory for ever, and silence its entry.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

LARGE = 1e30
"""Values up to here can take a parameter out of its range neither alone nor many of them in a lifetime."""


def is_large(values: torch.Tensor) -> bool:
    """Tell whether a magnitude exceeds :data:`LARGE`; without a copy, and on a device with one wait."""
    return values.numel() > 0 and bool(torch.stack(values.aminmax()).abs().amax() > LARGE)


@dataclass(frozen=True, slots=True)
class GradientUpdate:
    """The update that a step adds to a memory before entries are selected from the memory.

    With ``d = scale·g + decay·θ``::

        r += d                        # momentum is None
        u = factor·u + d;  r += u     # otherwise

    Attributes:
        gradient: ``g``, ``[n]``, floating point, on the memory's device.
        parameters: ``θ``, ``[n]``, floating point; ``None`` if ``decay`` is 0.
        momentum: ``u``, fp32 ``[n]``, changed in place.
    """

    gradient: torch.Tensor
    scale: float
    parameters: torch.Tensor | None = None
    decay: float = 0.0
    momentum: torch.Tensor | None = None
    factor: float = 0.0


class Taken(NamedTuple):
    """Entries taken out of a memory: int64 ``[c]``, strictly increasing, and the memory's fp32 values before."""

    offsets: torch.Tensor
    values: torch.Tensor


class ThresholdResult(NamedTuple):
    """The entries that a pass has taken, the number of all entries above the threshold, and ``Σ (|x| − threshold)``."""

    taken: Taken
    count_above: int
    sum_above: float


class Kernels(Protocol):
    """A backend: a module with these functions."""

    def take(
        self, memory: torch.Tensor, added: GradientUpdate | None, threshold: float, keep: float, capacity: int
    ) -> ThresholdResult:
        """Accumulate, take out the first ``capacity`` entries above the threshold, leave ``keep·value`` behind."""

    def copy_above(self, x: torch.Tensor, threshold: float, capacity: int) -> ThresholdResult:
        """Copy the first ``capacity`` entries above the threshold."""

    def magnitude(self, x: torch.Tensor) -> tuple[float, float]:
        """Return sum and largest of ``|x|``; ``(0, 0)`` of an empty tensor."""

    def subtract_at(self, x: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> bool:
        """``x[offsets] −= values``; offsets int64, each once. False, and nothing is changed, if fp32 has no result.

        Only values above :data:`LARGE` make the kernel look at the results before.
        """

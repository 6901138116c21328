"""The interface of the selection kernels. All tensors are flat and contiguous; a *memory* is an fp32 residual ``r``."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class GradientUpdate:
    """What a step adds to a memory before it is selected from.

    With ``d = scale·g + decay·θ``::

        r += d                        # momentum is None
        u = factor·u + d;  r += u     # otherwise

    Attributes:
        gradient: ``g``, ``[n]``, floating point, on the memory's device.
        scale: factor of the gradient.
        parameters: ``θ``, ``[n]``, floating point; ``None`` where ``decay`` is 0.
        decay: factor of the parameters.
        momentum: ``u``, fp32 ``[n]``, changed in place.
        factor: of the momentum.
    """

    gradient: torch.Tensor
    scale: float
    parameters: torch.Tensor | None = None
    decay: float = 0.0
    momentum: torch.Tensor | None = None
    factor: float = 0.0


class Taken(NamedTuple):
    """What was taken out of a memory.

    Attributes:
        offsets: int64 ``[c]``, strictly increasing.
        values: fp32 ``[c]``: what the memory held there when it was taken.
    """

    offsets: torch.Tensor
    values: torch.Tensor


class ThresholdResult(NamedTuple):
    """What a pass has found.

    Attributes:
        taken: no more entries than the capacity.
        count_above: entries above the threshold.
        sum_above: ``Σ (|x| − threshold)`` over these entries.
    """

    taken: Taken
    count_above: int
    sum_above: float


class Kernels(Protocol):
    """A backend: a module with these functions."""

    def accumulate(self, memory: torch.Tensor, added: GradientUpdate) -> None:
        """Add ``added`` to ``memory``, in place, and bring its momentum up to date."""

    def take(
        self, memory: torch.Tensor, added: GradientUpdate | None, threshold: float, keep: float, capacity: int
    ) -> ThresholdResult:
        """Accumulate, take out the first ``capacity`` entries above the threshold, leave ``keep·value`` behind."""

    def take_difference(self, a: torch.Tensor, b: torch.Tensor, threshold: float, capacity: int) -> ThresholdResult:
        """Copy out ``a − b`` where its magnitude is above the threshold (the first ``capacity``)."""

    def count_above(self, x: torch.Tensor, threshold: float) -> tuple[int, float]:
        """Count the magnitudes above the threshold, and sum what they exceed it by."""

    def subtract_at(self, x: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
        """``x[offsets] −= values``; offsets int64, each once."""

    def exceeding(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        offsets: torch.Tensor,
        ends: NDArray[np.int64],
        bounds: NDArray[np.float32],
    ) -> torch.Tensor:
        """Return those of ``offsets`` where ``|a − b|`` exceeds the bound of its tensor, as int64.

        Args:
            a: fp32 ``[n]``.
            b: likewise.
            offsets: int32 or int64, ascending.
            ends: the end of each tensor, ascending; the last is ``n``.
            bounds: one for each tensor.
        """

    def magnitude(self, x: torch.Tensor) -> tuple[float, float]:
        """Return sum and largest of ``|x|``; ``(0, 0)`` of an empty tensor."""

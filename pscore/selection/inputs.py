"""The inputs of selectors: a residual, or several of them end to end.

A selector asks for statistics and takes entries by a threshold. A step's gradient is added to a residual by the first
call; if that call is :meth:`SelectionInput.take`, in the same pass over memory.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from pscore.selection.kernels import kernels_for, reference
from pscore.selection.kernels.base import GradientUpdate, Taken, ThresholdResult


class SelectionInput(ABC):
    """Numbers ``x`` (fp32, ``[numel]``) of which the largest in magnitude are to be taken."""

    numel: int

    @abstractmethod
    def take(self, threshold: float, capacity: int) -> ThresholdResult:
        """Take out every entry above the threshold, but no more than the first ``capacity``."""

    @abstractmethod
    def take_at(self, offsets: torch.Tensor) -> Taken:
        """Take out the entries at these offsets (int64, ascending)."""

    @abstractmethod
    def put_back(self, taken: Taken) -> None:
        """Undo a take, bit for bit, wholly or in part."""

    @abstractmethod
    def arrays(self) -> list[torch.Tensor]:
        """Return ``x`` in contiguous pieces, to be read only."""

    def count_above(self, threshold: float) -> tuple[int, float]:
        """Count the magnitudes above the threshold, and sum what they exceed it by; one reading pass."""
        found = [kernels_for(array).copy_above(array, threshold, 0) for array in self.arrays()]
        return sum(each.count_above for each in found), sum(each.sum_above for each in found)

    def magnitude(self) -> tuple[float, float]:
        """Return mean and largest magnitude; one reading pass."""
        found = [kernels_for(array).magnitude(array) for array in self.arrays()]
        return sum(total for total, _ in found) / self.numel, max(largest for _, largest in found)

    def stride_sample(self, step: int, first: int) -> torch.Tensor:
        """Return every ``step``-th element from ``first`` on, ``first < step``."""
        pieces, start = [], 0
        for array in self.arrays():
            pieces.append(array[(first - start) % step :: step])
            start += array.numel()
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class Memory(SelectionInput):
    """A residual (fp32 ``[n]``, contiguous; changed in place), and the update that this step adds to the residual.

    ``keep`` is the factor of an entry that is taken and stays.
    """

    def __init__(self, tensor: torch.Tensor, added: GradientUpdate | None = None, keep: float = 0.0) -> None:
        self.tensor = tensor
        self.numel = tensor.numel()
        self._added = added
        self._keep = keep

    def take(self, threshold: float, capacity: int) -> ThresholdResult:
        """The first call adds the update, in the same pass."""
        added, self._added = self._added, None
        return kernels_for(self.tensor).take(self.tensor, added, threshold, self._keep, capacity)

    def take_at(self, offsets: torch.Tensor) -> Taken:
        """Leave ``keep·x`` at the offsets."""
        (x,) = self.arrays()
        values = x[offsets]
        x[offsets] = self._keep * values
        return Taken(offsets, values)

    def put_back(self, taken: Taken) -> None:
        """Write the values where they were."""
        reference.put(self.tensor, taken.offsets, taken.values)

    def arrays(self) -> list[torch.Tensor]:
        """The first call adds the update."""
        if self._added is not None:
            self.take(math.inf, 0)
        return [self.tensor]


class Joined(SelectionInput):
    """Several inputs on one device, laid end to end: one threshold over a merged group."""

    def __init__(self, parts: Sequence[SelectionInput]) -> None:
        self.parts = tuple(parts)
        self.starts = [0, *np.cumsum([part.numel for part in parts]).tolist()]
        self.numel = self.starts[-1]

    def take(self, threshold: float, capacity: int) -> ThresholdResult:
        """Take from every part, even if there is no room left: each may have an update to add."""
        results: list[ThresholdResult] = []
        for part in self.parts:
            results.append(part.take(threshold, capacity))
            capacity -= results[-1].taken.offsets.numel()
        return ThresholdResult(
            self._joined([result.taken for result in results]),
            sum(result.count_above for result in results),
            sum(result.sum_above for result in results),
        )

    def take_at(self, offsets: torch.Tensor) -> Taken:
        """Take from each part."""
        return self._joined([part.take_at(piece) for part, piece in zip(self.parts, self._cut(offsets), strict=True)])

    def put_back(self, taken: Taken) -> None:
        """Put back into each part."""
        for part, piece in zip(self.parts, self.split(taken), strict=True):
            part.put_back(piece)

    def arrays(self) -> list[torch.Tensor]:
        """Those of each part."""
        return [array for part in self.parts for array in part.arrays()]

    def split(self, taken: Taken) -> list[Taken]:
        """Cut a selection by part, offsets counted from each part's start."""
        offsets = self._cut(taken.offsets)
        sizes = [piece.numel() for piece in offsets]
        return [Taken(piece, values) for piece, values in zip(offsets, torch.split(taken.values, sizes), strict=True)]

    def _cut(self, offsets: torch.Tensor) -> list[torch.Tensor]:
        borders = torch.tensor(self.starts[1:-1], dtype=torch.int64, device=offsets.device)
        bounds = [0, *torch.searchsorted(offsets, borders).tolist(), offsets.numel()]
        return [
            offsets[low:high] - start for low, high, start in zip(bounds, bounds[1:], self.starts[:-1], strict=False)
        ]

    def _joined(self, pieces: Sequence[Taken]) -> Taken:
        if len(pieces) == 1:
            return pieces[0]
        return Taken(
            torch.cat([piece.offsets + start for piece, start in zip(pieces, self.starts[:-1], strict=True)]),
            torch.cat([piece.values for piece in pieces]),
        )

"""What a selector selects from: a memory, a difference, or several of them as if they were one.

A selector asks for statistics and takes by a threshold, and never sees where the numbers come from. What a step adds to
a memory is added at the first question, and where that question is :meth:`Source.take`, in the same pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from pscore.select.kernels import kernels_for
from pscore.select.kernels.base import GradientUpdate, Taken, ThresholdResult


class Source(ABC):
    """Numbers ``x`` (fp32, ``[numel]``) of which the largest in magnitude are to be taken."""

    numel: int

    @abstractmethod
    def take(self, threshold: float, capacity: int) -> ThresholdResult:
        """Take out every entry above the threshold, but no more than ``capacity``, in ascending order."""

    @abstractmethod
    def take_at(self, offsets: torch.Tensor) -> Taken:
        """Take out the entries at these offsets (int64, ascending)."""

    @abstractmethod
    def put_back(self, taken: Taken) -> None:
        """Undo a take, bit for bit, wholly or in part."""

    @abstractmethod
    def tail(self, threshold: float) -> tuple[int, float]:
        """Count the magnitudes above the threshold, and sum what they exceed it by; one reading pass."""

    @abstractmethod
    def magnitude(self) -> tuple[float, float]:
        """Return mean and largest magnitude; one reading pass."""

    @abstractmethod
    def every(self, step: int, first: int) -> torch.Tensor:
        """Return every ``step``-th element from ``first`` on."""


class Memory(Source):
    """A residual, and what this step adds to it.

    Args:
        tensor: fp32 ``[n]``, contiguous; changed in place.
        added: what the step adds; ``None`` for nothing.
        keep: what remains of an entry that is taken, as a factor.
    """

    def __init__(self, tensor: torch.Tensor, added: GradientUpdate | None = None, keep: float = 0.0) -> None:
        """Nothing is added yet."""
        self.tensor = tensor
        self.numel = tensor.numel()
        self._added = added
        self._keep = keep
        self._kernels = kernels_for(tensor)

    def take(self, threshold: float, capacity: int) -> ThresholdResult:
        """See :class:`Source`; the first time, with what is added, in one pass."""
        added, self._added = self._added, None
        return self._kernels.take(self.tensor, added, threshold, self._keep, capacity)

    def take_at(self, offsets: torch.Tensor) -> Taken:
        """See :class:`Source`."""
        x = self._fed()
        values = x[offsets]
        x[offsets] = self._keep * values
        return Taken(offsets, values)

    def put_back(self, taken: Taken) -> None:
        """See :class:`Source`."""
        self.tensor[taken.offsets] = taken.values

    def tail(self, threshold: float) -> tuple[int, float]:
        """See :class:`Source`."""
        return self._kernels.tail(self._fed(), threshold)

    def magnitude(self) -> tuple[float, float]:
        """See :class:`Source`."""
        return self._kernels.magnitude(self._fed())

    def every(self, step: int, first: int) -> torch.Tensor:
        """See :class:`Source`."""
        return self._fed()[first::step]

    def _fed(self) -> torch.Tensor:
        if self._added is not None:
            self._kernels.feed(self.tensor, self._added)
            self._added = None
        return self.tensor


class Difference(Source):
    """``a − b``; neither is changed, so what is taken stays until someone adds it to ``b``.

    Args:
        a: fp32 ``[n]``, contiguous.
        b: likewise, on the same device.
    """

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Nothing is computed yet."""
        self.numel = a.numel()
        self._a, self._b = a, b
        self._kernels = kernels_for(a)
        self._whole: torch.Tensor | None = None

    def take(self, threshold: float, capacity: int) -> ThresholdResult:
        """See :class:`Source`."""
        return self._kernels.take_difference(self._a, self._b, threshold, capacity)

    def take_at(self, offsets: torch.Tensor) -> Taken:
        """See :class:`Source`."""
        return Taken(offsets, self._a[offsets] - self._b[offsets])

    def put_back(self, taken: Taken) -> None:
        """Nothing to do: taking has changed nothing."""

    def tail(self, threshold: float) -> tuple[int, float]:
        """See :class:`Source`."""
        return self._kernels.tail(self._computed(), threshold)

    def magnitude(self) -> tuple[float, float]:
        """See :class:`Source`."""
        return self._kernels.magnitude(self._computed())

    def every(self, step: int, first: int) -> torch.Tensor:
        """See :class:`Source`."""
        return self._a[first::step] - self._b[first::step]

    def _computed(self) -> torch.Tensor:
        """Write the difference out: where several passes are needed, they are cheaper over one array than over two."""
        if self._whole is None:
            self._whole = self._a - self._b
        return self._whole


class Joined(Source):
    """Several sources laid end to end: one threshold over a merged group.

    Args:
        parts: at least one, on one device.
    """

    def __init__(self, parts: Sequence[Source]) -> None:
        """Lay them end to end."""
        self.parts = tuple(parts)
        self.starts = [0, *np.cumsum([part.numel for part in parts]).tolist()]
        self.numel = self.starts[-1]

    def take(self, threshold: float, capacity: int) -> ThresholdResult:
        """See :class:`Source`."""
        sifts: list[ThresholdResult] = []
        for part in self.parts:  # every part, even where there is no room left: each has something to add
            sifts.append(part.take(threshold, capacity - sum(sift.taken.offsets.numel() for sift in sifts)))
        return ThresholdResult(
            self._joined([sift.taken for sift in sifts]),
            sum(sift.above for sift in sifts),
            sum(sift.excess for sift in sifts),
        )

    def take_at(self, offsets: torch.Tensor) -> Taken:
        """See :class:`Source`."""
        return self._joined([part.take_at(piece) for part, piece in zip(self.parts, self._cut(offsets), strict=True)])

    def put_back(self, taken: Taken) -> None:
        """See :class:`Source`."""
        for part, piece in zip(self.parts, self.split(taken), strict=True):
            part.put_back(piece)

    def tail(self, threshold: float) -> tuple[int, float]:
        """See :class:`Source`."""
        found = [part.tail(threshold) for part in self.parts]
        return sum(count for count, _ in found), sum(excess for _, excess in found)

    def magnitude(self) -> tuple[float, float]:
        """See :class:`Source`."""
        found = [part.magnitude() for part in self.parts]
        total = sum(mean * part.numel for (mean, _), part in zip(found, self.parts, strict=True))
        return total / max(1, self.numel), max(largest for _, largest in found)

    def every(self, step: int, first: int) -> torch.Tensor:
        """See :class:`Source`."""
        firsts = [(first - start) % step if start else first for start in self.starts[:-1]]
        return torch.cat([part.every(step, at) for part, at in zip(self.parts, firsts, strict=True)])

    def split(self, taken: Taken) -> list[Taken]:
        """Cut what was taken by part, offsets counted from each part's start."""
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
        starts = self.starts[:-1]
        return Taken(
            torch.cat([piece.offsets + start for piece, start in zip(pieces, starts, strict=True)]),
            torch.cat([piece.values for piece in pieces]),
        )

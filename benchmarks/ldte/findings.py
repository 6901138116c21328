"""What is found out about one captured vector: how it is distributed, and what LDTE's first threshold makes of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.ldte.capture import Moment
from benchmarks.ldte.fits import Laplace, Normal, wasserstein
from benchmarks.ldte.published import search
from pscore.selection import DEFAULT_DENSE_BELOW, entries_for

DENSITIES = (0.01, 0.001)
ALL = ""
"""The name of all tensors laid end to end."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """What the estimate and the search come to at one density.

    Attributes:
        density: asked for.
        first: entries above the estimated threshold, over those asked for: k̂/k.
        passes: of counting, until that was within the tolerance.
    """

    density: float
    first: float
    passes: int


@dataclass(frozen=True, slots=True)
class Finding:
    """One vector.

    Attributes:
        step: of the run.
        kind: ``gradient``, or ``residual``: what is selected from, the paper's residual gradients.
        tensor: its name; :data:`ALL` for all together.
        elements: how many.
        zeros: share of them that is exactly 0.
        normal: Wasserstein-1 distance from the normal fit, over the standard deviation.
        laplace: likewise from the Laplace fit.
        thresholds: by density; empty where the vector is too small for the density.
    """

    step: int
    kind: str
    tensor: str
    elements: int
    zeros: float
    normal: float
    laplace: float
    thresholds: Sequence[Threshold]

    @property
    def ratio(self) -> float:
        """The Laplace fit's distance over the normal one's: below 1 Laplace is nearer."""
        return self.laplace / self.normal

    @classmethod
    def read(cls, plain: dict[str, Any]) -> "Finding":
        """Read it as JSON has it."""
        return cls(**plain | {"thresholds": [Threshold(**each) for each in plain["thresholds"]]})


def examine(moment: Moment) -> list[Finding]:
    """Examine every tensor of :data:`~pscore.selection.DEFAULT_DENSE_BELOW` elements or more, and all together.

    A vector without two different numbers has no distribution, and is left out.
    """
    found: list[Finding | None] = []
    for kind, vectors in (("gradient", moment.gradients), ("residual", moment.accumulated())):
        for name, vector in zip(moment.names, vectors, strict=True):
            if vector.numel() >= DEFAULT_DENSE_BELOW:
                found.append(_examine(moment.step, kind, name, vector))
        found.append(_examine(moment.step, kind, ALL, torch.cat(vectors)))
    return [each for each in found if each is not None]


def _examine(step: int, kind: str, name: str, vector: torch.Tensor) -> Finding | None:
    array = vector.detach().cpu().numpy()
    ordered = torch.from_numpy(np.sort(array))
    if ordered[0] == ordered[-1]:
        return None
    fit = Normal.of(ordered)
    normal, laplace = (wasserstein(ordered, each) / fit.scale for each in (fit, Laplace.of(ordered)))
    zeros = 1 - np.count_nonzero(array) / array.size
    return Finding(step, kind, name, vector.numel(), zeros, normal, laplace, thresholds(np.abs(array)))


def thresholds(magnitudes: np.ndarray) -> list[Threshold]:
    """Run LDTE-BS at each density for which there is at least one entry to find."""
    n = magnitudes.size
    ordered = np.sort(magnitudes)
    mean, largest = float(ordered.mean(dtype=np.float64)), float(ordered[-1])

    def count_above(threshold: float) -> int:
        return n - int(np.searchsorted(ordered, np.float32(threshold), side="right"))

    found = []
    for density in DENSITIES:
        k = entries_for(n, density)
        if density * n >= 1 and k < n:
            result = search(count_above, mean, largest, n, k)
            found.append(Threshold(density, result.first / k, result.passes))
    return found

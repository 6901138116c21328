"""Selectors of the published comparison with LDTE-BS (docs/evidence/ldte.md), for one tensor on the host."""

import numpy as np

from pscore.selection import SelectFunction
from pscore.selection.exact import largest
from pscore.selection.rule import Integers, Reals

_REUSED_STEPS = 5
_SAMPLE_SHARE = 0.01
_FEWEST_SAMPLES = 256
_UPPER, _LOWER = 1.3, 0.8
_MOST_ADAPTATIONS = 10
_TRIMMING_RATIOS = (0.8, 0.6, 0.4, 0.2, 0.0)


def of(name: str) -> SelectFunction:
    """Return a new selector by its name; two of them keep something between steps."""
    return {"sampled": Sampled, "trimmed": lambda: trimmed, "reuse": Reused}[name]()


def above(x: Reals, threshold: float) -> Integers:
    """Return the offsets of the magnitudes above a threshold."""
    return np.flatnonzero(np.abs(x) > np.float32(threshold))


def trimmed(x: Reals, k: int) -> Integers:
    """Trimmed top-k, as in RedSync (Fang et al., JPDC 2019, algorithm 2): a threshold trims before the rest is ranked.

    ``t = mean + ratio·(max − mean)`` with the first ratio of 0.8, 0.6, … at which at least ``k`` entries lie above; 0
    if fewer than ``k`` lie above the mean.
    """
    magnitudes = np.abs(x)
    mean, peak = float(magnitudes.mean(dtype=np.float64)), float(magnitudes.max())
    thresholds = (mean + ratio * (peak - mean) for ratio in _TRIMMING_RATIOS)
    offsets = above(x, next((t for t in thresholds if np.count_nonzero(magnitudes > np.float32(t)) >= k), 0.0))
    return offsets[largest(x[offsets], k)]


class Sampled:
    """Take what exceeds the top-k of a 1 % sample, as in Deep Gradient Compression (Lin et al., ICLR 2018, section 3).

    If more than 1.3·k entries pass, the ``k`` largest of them are taken (the paper's hierarchical selection); if fewer
    than 0.8·k, the threshold is lowered by 0.8, at most ten times. The sample is every 100th element (never fewer than
    256 in all), starting elsewhere at each step.
    """

    def __init__(self) -> None:
        self._turn = 0

    def __call__(self, x: Reals, k: int) -> Integers:
        """Choose in one step."""
        step = max(1, min(int(1 / _SAMPLE_SHARE), x.size // _FEWEST_SAMPLES))
        sample = np.abs(x[self._turn % step :: step])
        self._turn += 1
        wanted = max(1, round(k * sample.size / x.size))
        threshold = float(np.partition(sample, sample.size - wanted)[sample.size - wanted])
        offsets = above(x, threshold)
        for _ in range(_MOST_ADAPTATIONS):
            if offsets.size >= _LOWER * k or threshold == 0:
                break
            threshold *= _LOWER
            offsets = above(x, threshold)
        return offsets[largest(x[offsets], k)] if offsets.size > _UPPER * k else offsets


class Reused:
    """Threshold reuse, as in RedSync (section 5.2): the ``k``-th magnitude of every fifth step is used in the others.

    In these the count is as it comes, up to ``2·k``.
    """

    def __init__(self) -> None:
        self._age, self._threshold = _REUSED_STEPS, 0.0

    def __call__(self, x: Reals, k: int) -> Integers:
        """Choose in one step."""
        if self._age >= _REUSED_STEPS:
            kth = np.partition(np.abs(x), x.size - k)[x.size - k]
            self._age, self._threshold = 0, float(np.nextafter(kth, np.float32(0)))
        self._age += 1
        offsets = above(x, self._threshold)
        return offsets[largest(x[offsets], 2 * k)]

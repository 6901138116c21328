"""Selectors of one tensor that keep nothing between steps."""

from collections.abc import Callable

import numpy as np

from pscore.selection.rule import TOLERANCE, Integers, Reals

SelectFunction = Callable[[Reals, int], Integers]
"""Returns the offsets, ascending, of about the ``k < n`` entries of greatest magnitude, but never of a zero."""


def exact(x: Reals, k: int) -> Integers:
    """Choose the ``k`` largest; of equal ones the first, so it is deterministic. About five passes over memory."""
    offsets = largest(x, k)
    chosen: Integers = offsets[x[offsets] != 0]
    return chosen


def ldte(x: Reals, k: int) -> Integers:
    """Laplace threshold estimation with a binary search: start at ``b·ln(n/k)``, then halve ``[0, max|x|]`` around it.

    As published (docs/evidence/ldte.md): counting passes until the count is within the tolerance of ``k``.
    """
    from pscore.selection.host import rule_loops

    offsets = np.flatnonzero(np.abs(x) > np.float32(rule_loops.ldte(x, k, TOLERANCE)))
    return offsets[largest(x[offsets], k)] if offsets.size > (1 + TOLERANCE) * k else offsets


def largest(x: Reals, k: int) -> Integers:
    """Return the offsets of the ``k`` largest magnitudes, ascending; of equal ones the first. NaN is the largest.

    By a quickselect (``numpy.partition``), which is several times faster than ``torch.topk``.
    """
    magnitude = np.abs(x)
    if k >= magnitude.size:
        return np.arange(magnitude.size)
    threshold = np.partition(magnitude, magnitude.size - k)[magnitude.size - k]
    if np.isnan(threshold):
        return np.flatnonzero(np.isnan(magnitude))[:k]
    above = np.flatnonzero(~(magnitude <= threshold))
    ties = np.flatnonzero(magnitude == threshold)[: k - above.size]
    return np.sort(np.concatenate([above, ties]))

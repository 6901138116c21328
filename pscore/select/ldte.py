"""LDTE-BS: Laplace threshold estimation with a binary search."""

from pscore.select.base import TOLERANCE, SelectorState, keep_largest, nothing, take_all
from pscore.select.inputs import Source
from pscore.select.kernels.base import Taken
from pscore.select.search import laplace_threshold

_MOST_HALVINGS = 20


def ldte(source: Source, k: int, recall: SelectorState) -> Taken:
    """Take about ``k`` entries: ``t = b·ln(n/k)`` with ``b = mean|x|``, then halve ``[0, max|x|]`` around it.

    As published: at most 20 halvings, each a counting pass, until the count is within the tolerance of ``k``.
    """
    if k >= source.numel:
        return take_all(source)
    mean, largest = source.magnitude()
    if largest == 0:
        return nothing(source.every(1, 0))
    low, high = 0.0, largest
    threshold = min(laplace_threshold(mean, source.numel, k), largest)
    for _ in range(_MOST_HALVINGS):
        count, _excess = source.tail(threshold)
        if abs(count - k) <= TOLERANCE * k:
            break
        low, high = (threshold, high) if count > k else (low, threshold)
        threshold = (low + high) / 2
    else:
        threshold = low  # equal magnitudes on both sides of k: take from the side that has enough
    sift = source.take(threshold, source.numel)
    if sift.above > (1 + TOLERANCE) * k:
        return keep_largest(source, sift.taken, k)
    return sift.taken

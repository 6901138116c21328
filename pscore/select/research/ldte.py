"""LDTE-BS: Laplace threshold estimation with a binary search."""

from pscore.select.base import TOLERANCE, SelectorState, keep_largest, nothing, take_all
from pscore.select.inputs import SelectionInput
from pscore.select.kernels.base import Taken
from pscore.select.search import laplace_threshold

_MOST_HALVINGS = 20


def ldte(inputs: SelectionInput, k: int, state: SelectorState) -> Taken:
    """Take about ``k`` entries: ``t = b·ln(n/k)`` with ``b = mean|x|``, then halve ``[0, max|x|]`` around it.

    As published: at most 20 halvings, each a counting pass, until the count is within the tolerance of ``k``.
    """
    if k >= inputs.numel:
        return take_all(inputs)
    mean, largest = inputs.magnitude()
    if largest == 0:
        return nothing(inputs.stride_sample(1, 0))
    low, high = 0.0, largest
    threshold = min(laplace_threshold(mean, inputs.numel, k), largest)
    for _ in range(_MOST_HALVINGS):
        count, _excess = inputs.count_above(threshold)
        if abs(count - k) <= TOLERANCE * k:
            break
        low, high = (threshold, high) if count > k else (low, threshold)
        threshold = (low + high) / 2
    else:
        threshold = low  # equal magnitudes on both sides of k: take from the side that has enough
    result = inputs.take(threshold, inputs.numel)
    if result.count_above > (1 + TOLERANCE) * k:
        return keep_largest(inputs, result.taken, k)
    return result.taken

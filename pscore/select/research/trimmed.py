"""Trimmed top-k, as in RedSync (Fang et al., JPDC 2019, algorithm 2)."""

from pscore.select.base import SelectorState, keep_largest, nothing, take_all
from pscore.select.inputs import SelectionInput
from pscore.select.kernels.base import Taken

_FIRST_RATIO, _RATIO_STEP = 0.8, 0.2


def trimmed(inputs: SelectionInput, k: int, state: SelectorState) -> Taken:
    """Take the ``k`` largest: a threshold between mean and maximum trims the rest away before they are ranked.

    ``t = mean + ratio·(max − mean)`` with ratio 0.8, 0.6, … until at least ``k`` entries lie above; where fewer than
    ``k`` lie above the mean, 0.
    """
    if k >= inputs.numel:
        return take_all(inputs)
    mean, largest = inputs.magnitude()
    if largest == 0:
        return nothing(inputs.stride_sample(1, 0))
    thresholds = [
        mean + (_FIRST_RATIO - _RATIO_STEP * turn) * (largest - mean)
        for turn in range(round(_FIRST_RATIO / _RATIO_STEP) + 1)
    ]
    threshold = next((t for t in thresholds if inputs.count_above(t)[0] >= k), 0.0)
    return keep_largest(inputs, inputs.take(threshold, inputs.numel).taken, k)

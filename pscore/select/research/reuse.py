"""Threshold reuse, as in RedSync (Fang et al., JPDC 2019, section 5.2): searched every fifth step, used between."""

from pscore.select.base import SelectorState, keep_largest, nothing, take_all
from pscore.select.exact import exact
from pscore.select.inputs import SelectionInput
from pscore.select.kernels.base import Taken
from pscore.select.search import TailSearch, laplace_threshold

PERIOD_STEPS = 5
_ROOM = 2  # what passes the old threshold is limited to this multiple of k


def reuse(inputs: SelectionInput, k: int, state: SelectorState) -> Taken:
    """Take by a threshold that is searched every fifth step; between, the count is what it is, up to 2·k."""
    if k >= inputs.numel:
        return take_all(inputs)
    threshold = state.get("threshold")
    age = state.get("age", 0.0)
    if threshold is None or age >= PERIOD_STEPS:
        mean, peak = inputs.magnitude()
        if peak == 0:
            return nothing(inputs.stride_sample(1, 0))
        first = threshold if threshold else min(peak, laplace_threshold(mean, inputs.numel, k))
        threshold, age = TailSearch(k).run(inputs, first), 0.0
        if threshold is None:
            state.clear()
            return exact(inputs, k, state)
    state["threshold"], state["age"] = threshold, age + 1
    return keep_largest(inputs, inputs.take(threshold, inputs.numel).taken, _ROOM * k)

"""Threshold reuse, as in RedSync (Fang et al., JPDC 2019, section 5.2): searched every fifth step, used between."""

from pscore.select.base import SelectorState, keep_largest, nothing, take_all
from pscore.select.exact import exact
from pscore.select.inputs import Source
from pscore.select.kernels.base import Taken
from pscore.select.search import TailSearch, laplace_threshold

PERIOD_STEPS = 5
_ROOM = 2  # what passes the old threshold is limited to this multiple of k


def reuse(source: Source, k: int, recall: SelectorState) -> Taken:
    """Take by a threshold that is searched every fifth step; between, the count is what it is, up to 2·k."""
    if k >= source.numel:
        return take_all(source)
    threshold = recall.get("threshold")
    age = recall.get("age", 0.0)
    if threshold is None or age >= PERIOD_STEPS:
        mean, peak = source.magnitude()
        if peak == 0:
            return nothing(source.every(1, 0))
        first = threshold if threshold else min(peak, laplace_threshold(mean, source.numel, k))
        threshold, age = TailSearch(k).run(source, first), 0.0
        if threshold is None:
            recall.clear()
            return exact(source, k, recall)
    recall["threshold"], recall["age"] = threshold, age + 1
    return keep_largest(source, source.take(threshold, source.numel).taken, _ROOM * k)

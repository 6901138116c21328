"""The default: last step's threshold in one pass, corrected by the secant of the tail.

The threshold is known before the step, so one pass accumulates and takes. The count that the pass finds moves the
threshold for the next step, by the tail's own scale. Where the count misses ``k`` by more than the tolerance, it is
corrected within the step: a surplus is put back (no pass over the memory), a lack costs counting passes and a second
take. The first step starts at the Laplace estimate (see :mod:`pscore.select.research.ldte`).

The threshold does not follow the learning rate: when that falls, the entries near the threshold still consist of steps
at the old rate. The threshold drifts down as these are taken, and the drift is predicted.
"""

import math

from pscore.select.base import TOLERANCE, SelectorState, keep_largest, nothing, take_all
from pscore.select.exact import exact
from pscore.select.inputs import SelectionInput
from pscore.select.kernels.base import Taken, ThresholdResult
from pscore.select.search import TailSearch, laplace_threshold

_LEVEL_GAIN, _DRIFT_GAIN = 0.6, 0.3
_RISING = 0.9  # of a drift that is kept where it goes up
_RANKED_STEPS = 16
_ROOM = 3  # capacity of the pass, as a multiple of k: what a surplus may be without another pass


def warm(inputs: SelectionInput, k: int, state: SelectorState) -> Taken:
    """Take ``k`` entries within the tolerance; ``state`` has the threshold."""
    if k >= inputs.numel:
        return take_all(inputs)
    if state.get("ranked", 0) > 0:
        return _rank(inputs, k, state, state["ranked"] - 1)
    expected = state.get("threshold")
    search = TailSearch(k)
    if expected is None:
        mean, largest = inputs.magnitude()
        if largest == 0:
            return nothing(inputs.stride_sample(1, 0))
        expected = search.run(inputs, min(largest, laplace_threshold(mean, inputs.numel, k)))
        if expected is None:
            return _rank(inputs, k, state, _RANKED_STEPS)
    capacity = _ROOM * k
    result = inputs.take(expected, capacity)
    threshold: float | None = expected
    lacks = result.count_above < (1 - TOLERANCE) * k and threshold != 0  # at 0 there is no more to be had
    if lacks or result.count_above > capacity:
        inputs.put_back(result.taken)
        search.update(expected, result.count_above, result.sum_above)
        threshold = search.run(inputs)
        if threshold is None:
            return _rank(inputs, k, state, _RANKED_STEPS)
        result = inputs.take(threshold, capacity)
    assert threshold is not None
    _predict(state, threshold, result, k)
    if result.count_above > (1 + TOLERANCE) * k:
        return keep_largest(inputs, result.taken, k)
    return result.taken


def _rank(inputs: SelectionInput, k: int, state: SelectorState, steps: float) -> Taken:
    """Take the exact top-k, now and in ``steps`` more steps: without a threshold, ranking is cheaper than counting."""
    taken = exact(inputs, k, state)
    state.clear()
    if steps:
        state["ranked"] = steps
    elif taken.values.numel():
        state["threshold"] = float(taken.values.abs().min())
    return taken


def _predict(state: SelectorState, threshold: float, result: ThresholdResult, k: int) -> None:
    """Set the threshold of the next step: level and drift of the best threshold, smoothed (Holt's linear method).

    The best one of this step was ``t + β·ln(c/k)`` with ``β`` = mean excess. The drift matters for a while after the
    learning rate has dropped: each step then takes from a residual that grows more slowly than it is emptied. Upwards
    it is damped: while a residual fills, its threshold rises with the root of the steps, ever more slowly, and would be
    overshot.
    """
    if threshold == 0 and result.count_above <= k:
        state.update(threshold=0.0, drift=0.0)
        return
    best = max(threshold / 2, threshold + result.sum_above / result.count_above * math.log(result.count_above / k))
    expected = state.get("threshold", best)
    drift = state.get("drift", 0.0)
    drift *= _RISING if drift > 0 else 1.0
    level = expected + _LEVEL_GAIN * (best - expected)
    drift += _DRIFT_GAIN * (level - expected)
    state["drift"] = drift
    state["threshold"] = max(best / 2, level + drift)

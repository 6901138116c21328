"""The default: last step's threshold in one pass, corrected by the secant of the tail.

What a step takes is decided by a threshold known before the step, so that one pass accumulates and takes. The count
that the pass finds moves the threshold for the next step, by the tail's own scale. Where the count misses ``k`` by more
than the tolerance, it is mended within the step: a surplus is put back (no pass over the memory), a lack costs counting
passes and a second take. The Laplace estimate (see :mod:`pscore.select.ldte`) is where the first step starts.

The threshold does not follow the learning rate: when that falls, the entries near the threshold are still made of steps
at the old rate. It drifts down as they are taken, and the drift is foreseen.
"""

import math

from pscore.select.base import TOLERANCE, SelectorState, keep_largest, nothing, take_all
from pscore.select.exact import exact
from pscore.select.inputs import Source
from pscore.select.kernels.base import Taken, ThresholdResult
from pscore.select.search import TailSearch, laplace_threshold

_LEVEL_GAIN, _DRIFT_GAIN = 0.6, 0.3
_RISING = 0.9  # of a drift that is kept where it goes up
_RANKED_STEPS = 16
_ROOM = 3  # capacity of the pass, as a multiple of k: what a surplus may be without another pass


def warm(source: Source, k: int, recall: SelectorState) -> Taken:
    """Take ``k`` entries within the tolerance; ``recall`` holds the threshold."""
    if k >= source.numel:
        return take_all(source)
    if recall.get("ranked", 0) > 0:
        return _rank(source, k, recall, recall["ranked"] - 1)
    expected = recall.get("threshold")
    search = TailSearch(k)
    if expected is None:
        mean, largest = source.magnitude()
        if largest == 0:
            return nothing(source.every(1, 0))
        expected = search.run(source, min(largest, laplace_threshold(mean, source.numel, k)))
        if expected is None:
            return _rank(source, k, recall, _RANKED_STEPS)
    capacity = _ROOM * k
    sift = source.take(expected, capacity)
    threshold: float | None = expected
    lacks = sift.above < (1 - TOLERANCE) * k and threshold != 0  # at 0 there is no more to be had
    if lacks or sift.above > capacity:
        source.put_back(sift.taken)
        search.saw(expected, sift.above, sift.excess)
        threshold = search.run(source)
        if threshold is None:
            return _rank(source, k, recall, _RANKED_STEPS)
        sift = source.take(threshold, capacity)
    assert threshold is not None
    _foresee(recall, threshold, sift, k)
    if sift.above > (1 + TOLERANCE) * k:
        return keep_largest(source, sift.taken, k)
    return sift.taken


def _rank(source: Source, k: int, recall: SelectorState, steps: float) -> Taken:
    """Take the exact top-k, in this step and in some to come: where counting finds no threshold, ranking costs less."""
    taken = exact(source, k, recall)
    recall.clear()
    if steps:
        recall["ranked"] = steps
    elif taken.values.numel():
        recall["threshold"] = float(taken.values.abs().min())
    return taken


def _foresee(recall: SelectorState, threshold: float, sift: ThresholdResult, k: int) -> None:
    """Set the threshold of the next step: level and drift of where ``k`` lies, smoothed (Holt's linear method).

    ``k`` lay at ``t + β·ln(c/k)`` with ``β`` = mean excess. The drift matters for a while after the learning rate has
    dropped: each step then takes from a residual that grows more slowly than it is emptied. Upwards it is damped: while
    a residual fills, its threshold rises with the root of the steps, ever more slowly, and would be overshot.
    """
    if threshold == 0 and sift.above <= k:
        recall.update(threshold=0.0, drift=0.0)
        return
    lay = max(threshold / 2, threshold + sift.excess / sift.above * math.log(sift.above / k))
    expected = recall.get("threshold", lay)
    drift = recall.get("drift", 0.0)
    drift *= _RISING if drift > 0 else 1.0
    level = expected + _LEVEL_GAIN * (lay - expected)
    drift += _DRIFT_GAIN * (level - expected)
    recall["drift"] = drift
    recall["threshold"] = max(lay / 2, level + drift)

"""Selectors of the published comparison with LDTE-BS (docs/evidence/ldte.md); none of them is a default."""

import math

from pscore.selection.base import TOLERANCE, SelectorState, exact, keep_largest, largest, take_all
from pscore.selection.inputs import SelectionInput
from pscore.selection.kernels.base import Taken
from pscore.selection.warm import TailSearch, laplace_threshold

_MOST_HALVINGS = 20
_REUSED_STEPS = 5
_SAMPLE_SHARE = 0.01
_FEWEST_SAMPLES = 256
_UPPER, _LOWER = 1.3, 0.8
_MOST_ADAPTATIONS = 10
_TRIMMING_RATIOS = (0.8, 0.6, 0.4, 0.2, 0.0)


def ldte(inputs: SelectionInput, k: int, state: SelectorState) -> Taken:
    """Laplace threshold estimation with a binary search: start at ``b·ln(n/k)``, then halve ``[0, max|x|]`` around it.

    As published: at most 20 halvings, each a counting pass, until the count is within the tolerance of ``k``.
    """
    if k >= inputs.numel:
        return take_all(inputs)
    mean, high = inputs.magnitude()
    if high == 0:
        return take_all(inputs)
    low, threshold = 0.0, min(high, mean * math.log(inputs.numel / k))
    for _ in range(_MOST_HALVINGS):
        count, _excess = inputs.count_above(threshold)
        if abs(count - k) <= TOLERANCE * k:
            break
        low, high = (threshold, high) if count > k else (low, threshold)
        threshold = (low + high) / 2
    else:
        threshold = low  # equal magnitudes on both sides of k: take from the side that has enough
    result = inputs.take(threshold, inputs.numel)
    return keep_largest(inputs, result.taken, k) if result.count_above > (1 + TOLERANCE) * k else result.taken


def reuse(inputs: SelectionInput, k: int, state: SelectorState) -> Taken:
    """Threshold reuse, as in RedSync (Fang et al., JPDC 2019, section 5.2): searched every fifth step, used between.

    Between, the count is as it comes, up to ``2·k``.
    """
    if k >= inputs.numel:
        return take_all(inputs)
    threshold = state.get("threshold")
    age = state.get("age", 0.0)
    if threshold is None or age >= _REUSED_STEPS:
        first = laplace_threshold(inputs, k)
        if first == 0:
            return take_all(inputs)
        threshold, age = TailSearch(k, TOLERANCE * k).run(inputs, threshold or first), 0.0
        if threshold is None:
            state.clear()
            return exact(inputs, k, state)
    state["threshold"], state["age"] = threshold, age + 1
    return keep_largest(inputs, inputs.take(threshold, inputs.numel).taken, 2 * k)


def sampled(inputs: SelectionInput, k: int, state: SelectorState) -> Taken:
    """Take what exceeds the top-k of a 1 % sample, as in Deep Gradient Compression (Lin et al., ICLR 2018, section 3).

    If more than 1.3·k entries pass, the ``k`` largest of them are taken (the paper's hierarchical selection); if
    fewer than 0.8·k, the threshold is lowered by 0.8, at most ten times. The sample is every 100th element (never fewer
    than 256 in all), starting elsewhere at each step.
    """
    n = inputs.numel
    if k >= n:
        return take_all(inputs)
    step = max(1, min(int(1 / _SAMPLE_SHARE), n // _FEWEST_SAMPLES))
    turn = int(state.get("turn", 0))
    state["turn"] = (turn + 1) % step
    sample = inputs.stride_sample(step, turn % step).abs()
    wanted = max(1, round(k * sample.numel() / n))
    threshold = float(sample[largest(sample, wanted)].min())
    result = inputs.take(threshold, n)
    for _ in range(_MOST_ADAPTATIONS):
        if result.count_above >= _LOWER * k or threshold == 0:
            break
        inputs.put_back(result.taken)
        threshold *= _LOWER
        result = inputs.take(threshold, n)
    return keep_largest(inputs, result.taken, k) if result.count_above > _UPPER * k else result.taken


def trimmed(inputs: SelectionInput, k: int, state: SelectorState) -> Taken:
    """Trimmed top-k, as in RedSync (Fang et al., JPDC 2019, algorithm 2): a threshold trims before the rest is ranked.

    ``t = mean + ratio·(max − mean)`` with the first ratio of 0.8, 0.6, … at which at least ``k`` entries lie above;
    if fewer than ``k`` lie above the mean, 0.
    """
    if k >= inputs.numel:
        return take_all(inputs)
    mean, peak = inputs.magnitude()
    if peak == 0:
        return take_all(inputs)
    thresholds = (mean + ratio * (peak - mean) for ratio in _TRIMMING_RATIOS)
    threshold = next((t for t in thresholds if inputs.count_above(t)[0] >= k), 0.0)
    return keep_largest(inputs, inputs.take(threshold, inputs.numel).taken, k)

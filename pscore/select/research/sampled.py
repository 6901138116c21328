"""Sampled selection, as in Deep Gradient Compression (Lin et al., ICLR 2018, section 3 and its published code)."""

from pscore.select.base import SelectorState, keep_largest, largest, take_all
from pscore.select.inputs import SelectionInput
from pscore.select.kernels.base import Taken

_SAMPLE_SHARE = 0.01
_FEWEST_SAMPLES = 256
_UPPER, _LOWER = 1.3, 0.8
_MOST_ADAPTATIONS = 10


def sampled(inputs: SelectionInput, k: int, state: SelectorState) -> Taken:
    """Take about ``k`` entries: the threshold is that of the top-k of a 1 % sample.

    Where it lets more than 1.3·k pass, the ``k`` largest of these are taken (the paper's hierarchical selection);
    where fewer than 0.8·k, it is lowered by 0.8, at most ten times. The sample is every 100th element (never fewer than
    256 in all), starting elsewhere at each step.
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
    if result.count_above > _UPPER * k:
        return keep_largest(inputs, result.taken, k)
    return result.taken

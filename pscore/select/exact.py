"""Exact top-k of |x|; of equal ones the first, so the result is deterministic."""

from pscore.select.base import SelectorState, largest, take_all
from pscore.select.inputs import SelectionInput
from pscore.select.kernels.base import Taken


def exact(inputs: SelectionInput, k: int, state: SelectorState) -> Taken:
    """Take the ``k`` largest; fewer where fewer are not zero. About five passes over memory."""
    if k >= inputs.numel:
        return take_all(inputs)
    x = inputs.stride_sample(1, 0)
    offsets = largest(x, k)
    return inputs.take_at(offsets[x[offsets] != 0])

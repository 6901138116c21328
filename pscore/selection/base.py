"""The interface of a selector, exact selection, and functions that several selectors share."""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pscore.selection.inputs import SelectionInput
from pscore.selection.kernels.base import Taken

SelectorState = dict[str, float]
"""A selector's memory of one input between steps; empty at first, and part of a saved state."""

TOLERANCE = 0.1
"""Share of ``k`` by which a threshold selector may miss it."""


class Selector(Protocol):
    """Takes about the ``k`` entries of greatest magnitude out of its input, but never a zero."""

    def __call__(self, inputs: SelectionInput, k: int, state: SelectorState) -> Taken:
        """Take them out of finite inputs, ``1 ≤ k ≤ n``; ``state`` belongs to these inputs and changes."""


def take_all(inputs: SelectionInput) -> Taken:
    """Take every entry that is not zero."""
    return inputs.take(0.0, inputs.numel).taken


def exact(inputs: SelectionInput, k: int, state: SelectorState) -> Taken:
    """Take the ``k`` largest; of equal ones the first, so it is deterministic. About five passes over memory."""
    if k >= inputs.numel:
        return take_all(inputs)
    x = inputs.stride_sample(1, 0)
    offsets = largest(x, k)
    return inputs.take_at(offsets[x[offsets] != 0])


def nothing(like: torch.Tensor) -> Taken:
    """Return an empty selection on the device of a tensor."""
    return Taken(
        torch.empty(0, dtype=torch.int64, device=like.device), torch.empty(0, dtype=torch.float32, device=like.device)
    )


def keep_largest(inputs: SelectionInput, taken: Taken, k: int) -> Taken:
    """Put back all entries but the ``k`` largest; of equal ones the first stay taken."""
    if taken.values.numel() <= k:
        return taken
    device = taken.values.device
    offsets, values, chosen = (x.cpu().numpy() for x in (*taken, largest(taken.values, k)))
    is_back = np.ones(values.size, bool)
    is_back[chosen] = False

    def part(of: NDArray[np.bool_] | NDArray[np.int64]) -> Taken:
        return Taken(torch.from_numpy(offsets[of]).to(device), torch.from_numpy(values[of]).to(device))

    inputs.put_back(part(is_back))
    return part(chosen)


def largest(x: torch.Tensor, k: int) -> torch.Tensor:
    """Return the offsets of the ``k`` largest magnitudes, ascending; of equal ones the first. NaN is the largest.

    On the host by a quickselect (``numpy.partition``), which is several times faster there than ``torch.topk``.
    """
    magnitude = x.detach().abs()
    if k >= magnitude.numel():
        return torch.arange(magnitude.numel(), dtype=torch.int64, device=x.device)
    if magnitude.device.type != "cpu":
        # A stable sort, because topk may choose any of equal elements.
        order: torch.Tensor = magnitude.sort(descending=True, stable=True).indices[:k]
        return order.sort().values
    array = magnitude.numpy()
    threshold = np.partition(array, array.size - k)[array.size - k]
    if np.isnan(threshold):
        return torch.from_numpy(np.flatnonzero(np.isnan(array))[:k])
    above = np.flatnonzero(~(array <= threshold))
    ties = np.flatnonzero(array == threshold)[: k - above.size]
    return torch.from_numpy(np.sort(np.concatenate([above, ties])))

"""What a selector is, and what several of them share."""

from typing import Protocol

import numpy as np
import torch

from pscore.select.inputs import SelectionInput
from pscore.select.kernels.base import Taken

SelectorState = dict[str, float]
"""What a selector remembers of one input from one step to the next; empty at first. Part of a saved state."""

TOLERANCE = 0.1
"""Share of ``k`` by which a threshold selector may miss it."""


class Selector(Protocol):
    """Takes about the ``k`` entries of greatest magnitude out of its input."""

    def __call__(self, inputs: SelectionInput, k: int, state: SelectorState) -> Taken:
        """Take them.

        Args:
            inputs: fp32 ``[n]``, finite. A zero is never taken, so an all-zero input gives nothing.
            k: how many, ``1 ≤ k ≤ n``.
            state: the state of this input, changed in place.
        """


def take_all(inputs: SelectionInput) -> Taken:
    """Take every entry that is not zero."""
    return inputs.take(0.0, inputs.numel).taken


def nothing(like: torch.Tensor) -> Taken:
    """Return an empty selection on the device of a tensor."""
    return Taken(torch.empty(0, dtype=torch.int64, device=like.device), torch.empty(0, device=like.device))


def keep_largest(inputs: SelectionInput, taken: Taken, k: int) -> Taken:
    """Put back all but the ``k`` largest of what was taken; of equal ones the first stay."""
    if taken.values.numel() <= k:
        return taken
    chosen = largest(taken.values, k)
    back = torch.ones(taken.values.numel(), dtype=torch.bool, device=taken.values.device)
    back[chosen] = False
    inputs.put_back(Taken(taken.offsets[back], taken.values[back]))
    return Taken(taken.offsets[chosen], taken.values[chosen])


def largest(x: torch.Tensor, k: int) -> torch.Tensor:
    """Return the offsets of the ``k`` largest magnitudes, ascending; of equal ones the first.

    On the host the threshold comes from a quickselect (``numpy.partition``), which is several times faster there than
    ``torch.topk``.
    """
    magnitude = x.detach().abs()
    if k >= magnitude.numel():
        return torch.arange(magnitude.numel(), device=x.device)
    if magnitude.device.type != "cpu":
        # A stable sort, because topk may choose any of equal elements.
        order: torch.Tensor = magnitude.sort(descending=True, stable=True).indices[:k]
        return order.sort().values
    array = magnitude.numpy()
    threshold = np.partition(array, array.size - k)[array.size - k]
    above = np.flatnonzero(array > threshold)
    ties = np.flatnonzero(array == threshold)[: k - above.size]
    return torch.from_numpy(np.sort(np.concatenate([above, ties])))

"""How entries are chosen."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pscore.selection import Selector
from pscore.selection.cuda import device_kernels
from pscore.selection.cuda.launches import DeviceKernels


@dataclass(frozen=True, slots=True)
class Choice:
    """How entries are chosen from each tensor.

    Attributes:
        selector: by a function of one tensor on the host; ``None`` for the rule of :mod:`pscore.selection.rule`.
        dense_below: tensors with fewer elements send every entry that is not zero.
        on_device: returns the kernels of a device, which carry out the rule; ``None`` if there are none.
    """

    selector: Selector | None
    dense_below: int
    on_device: Callable[[torch.device], DeviceKernels | None] = device_kernels

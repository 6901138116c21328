"""How entries are chosen."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from pscore.selection import Selector
from pscore.selection.cuda import device_kernels
from pscore.selection.cuda.launches import DeviceKernels
from pscore.selection.kernels import COMPILED_FROM


@dataclass(frozen=True, slots=True)
class Choice:
    """How entries are chosen.

    Attributes:
        over: whether each tensor, or all tensors of a group together, are selected from.
        dense_below: tensors with fewer elements send every entry that is not zero.
        on_device: returns the kernels of a device, which carry out the warm selector over single tensors; ``None`` on
            the host.
        compiled_from: elements of a model from which all its tensors on the host are passed over by one compiled call.
    """

    selector: Selector
    over: Literal["tensor", "group"]
    dense_below: int
    on_device: Callable[[torch.device], DeviceKernels | None] = device_kernels
    compiled_from: int = COMPILED_FROM

"""The loops over all elements of one tensor: accumulate, select, count. The interface is in ``base``."""

import torch

from pscore.selection.kernels import cpu, reference
from pscore.selection.kernels.base import Kernels

COMPILED_FROM = 16_384
"""Elements below which torch operations are used: no slower there, and a small model never waits for the compiler."""


def kernels_for(tensor: torch.Tensor) -> Kernels:
    """Return the kernels for such tensors: compiled loops for large ones on the host, torch operations elsewhere."""
    if tensor.device.type == "cpu" and tensor.numel() >= COMPILED_FROM:
        return cpu
    return reference

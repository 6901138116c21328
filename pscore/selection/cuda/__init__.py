"""Selection on a GPU: all tensors of a device in four launches of Triton's kernels."""

import logging
from functools import cache

import torch

from pscore.selection.cuda import launches

log = logging.getLogger("pscore")


@cache
def device_kernels(device: torch.device) -> launches.DeviceKernels | None:
    """Return the kernels of a CUDA device; ``None`` on the host, or if Triton is missing."""
    if device.type != "cuda":
        return None
    if not launches.available():
        log.warning("Triton is not installed: gradients are copied to the host, which selects entries: that is slower")
        return None
    return launches.DeviceKernels(device)

"""The loops over all elements: accumulate, select, count. One file a backend; the interface is in ``base``."""

import logging
from functools import cache

import torch

from pscore.select.kernels import cpu, cuda, reference
from pscore.select.kernels.base import Kernels

log = logging.getLogger("pscore")

COMPILED_FROM = 16_384
"""Elements below which torch operations are used: no slower there, and a small model never waits for the compiler."""


def kernels_for(tensor: torch.Tensor) -> Kernels:
    """Return the kernels for such tensors: compiled loops for large ones on the host, torch operations elsewhere."""
    if tensor.device.type == "cpu" and tensor.numel() >= COMPILED_FROM:
        return cpu
    return reference


@cache
def device_kernels(device: torch.device) -> cuda.DeviceKernels | None:
    """Return the kernels of a CUDA device; ``None`` on the host, or where Triton is missing."""
    if device.type != "cuda":
        return None
    if not cuda.available():
        log.warning("Triton is not installed: entries are selected by plain torch operations, which is slower")
        return None
    return cuda.DeviceKernels(device)

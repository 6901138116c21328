"""The loops over all elements: accumulate, select, count. One file a backend; the interface is in ``base``."""

import logging
from functools import cache
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch

    from pscore.select.kernels.base import Kernels
    from pscore.select.kernels.cuda import DeviceSelection

log = logging.getLogger("pscore")

_COMPILED_FROM = 16_384
"""Elements below which torch operations are used: no slower there, and a small model never waits for the compiler."""


def kernels_for(tensor: "torch.Tensor") -> "Kernels":
    """Return the kernels for such tensors: compiled loops for large ones on the host, torch operations elsewhere."""
    from pscore.select.kernels import cpu, reference

    on_host = tensor.device.type == "cpu" and tensor.numel() >= _COMPILED_FROM
    return cast("Kernels", cpu if on_host else reference)


@cache
def device_selection(device: "torch.device") -> "DeviceSelection | None":
    """Return what selects on a CUDA device without waiting for it; ``None`` on the host, or where Triton is missing."""
    if device.type != "cuda":
        return None
    from pscore.select.kernels import cuda

    if not cuda.available():
        log.warning("Triton is not installed: entries are selected by plain torch operations, which is slower")
        return None
    return cuda.DeviceSelection(device)

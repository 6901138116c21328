"""The loops over all elements: accumulate, select, count. One file a backend; :mod:`pscore.kernels.base` says what."""

from functools import cache
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch

    from pscore.kernels.base import Kernels
    from pscore.kernels.device import DeviceSelection


_WORTH_COMPILING = 16_384
"""Elements below which torch operations are used: no slower there, and a small model never waits for the compiler."""


def backend_of(tensor: "torch.Tensor") -> "Kernels":
    """Return the kernels for such tensors: compiled loops for large ones on the host, torch operations elsewhere."""
    return _backend(tensor.device.type == "cpu" and tensor.numel() >= _WORTH_COMPILING)


@cache
def _backend(on_host: bool) -> "Kernels":
    from pscore.kernels import host, reference

    return cast("Kernels", host if on_host and host.available() else reference)


@cache
def device_selection(device: "torch.device") -> "DeviceSelection | None":
    """Return what selects on a CUDA device without waiting for it; ``None`` on the host, or where Triton is missing."""
    if device.type != "cuda":
        return None
    from pscore.kernels import device as room
    from pscore.kernels import reference

    if not room.available():
        reference.say_that_it_stands_in("Triton")
        return None
    return room.DeviceSelection(device)

"""The loops over all elements: accumulate, select, count. One file a backend; :mod:`pscore.kernels.base` says what."""

from functools import cache
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import torch

    from pscore.kernels.base import Kernels


def backend_of(tensor: "torch.Tensor") -> "Kernels":
    """Return the kernels for tensors where this one lies: compiled loops on the host, torch operations elsewhere."""
    return _backend(tensor.device.type == "cpu")


@cache
def _backend(on_host: bool) -> "Kernels":
    from pscore.kernels import host, reference

    return cast("Kernels", host if on_host and host.available() else reference)

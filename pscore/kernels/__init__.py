"""The loops over all elements: accumulate, select, count. One file a backend; :mod:`pscore.kernels.base` says what."""

from functools import cache
from typing import TYPE_CHECKING, cast

from pscore.kernels.compiled import numba_works

if TYPE_CHECKING:
    import torch

    from pscore.kernels.base import Kernels


def backend_of(tensor: "torch.Tensor") -> "Kernels":
    """Return the kernels for tensors where this one lies: compiled loops on the host, torch operations elsewhere."""
    return _backend(tensor.device.type == "cpu" and numba_works())


@cache
def _backend(compiled_loops: bool) -> "Kernels":
    if compiled_loops:
        from pscore.kernels import host

        return cast("Kernels", host)
    from pscore.kernels import reference

    return cast("Kernels", reference)

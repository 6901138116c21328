"""The gradients of a step, and the addresses by which compiled loops read them."""

from collections.abc import Iterable, Mapping
from itertools import repeat
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray

from pscore.selection.host.segments import KINDS
from pscore.selection.rule import Integers

Scale = float | torch.Tensor
"""A factor for all gradients of a step. A tensor, of no dimension, is on their device, and nobody waits for it."""

_dtype, _is_cpu = attrgetter("dtype"), attrgetter("is_cpu")


class Gradients(dict[int, torch.Tensor]):
    """Gradients by position in the layout, ascending, each attribute of all of them read once.

    Attributes:
        positions: int64 ``[m]``.
        sizes: int64 ``[m]``, elements.
        addresses: int64 ``[m]``; 0 if no loop can read the tensor: not contiguous, another dtype, negated by torch's
            mark only.
        on_host: bool ``[m]``.
        kinds: int8 ``[m]``, as in :data:`~pscore.selection.host.segments.KINDS`; -1 for another dtype.
        unsound: int32 on a device, not 0 if some norm is not finite; ``None`` if all gradients are known to be.
    """

    positions: Integers
    sizes: Integers
    addresses: Integers
    kinds: NDArray[np.int8]
    on_host: NDArray[np.bool_]
    unsound: torch.Tensor | None = None

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        super().__init__(tensors)
        count, used = len(self), self.values()
        self.positions = np.fromiter(self, np.int64, count)
        self.sizes = np.fromiter(map(torch.Tensor.numel, used), np.int64, count)
        self.kinds = np.fromiter(map(KINDS.get, map(_dtype, used), repeat(-1)), np.int8, count)
        is_plain = np.fromiter(map(torch.Tensor.is_contiguous, used), bool, count)
        self.on_host = np.fromiter(map(_is_cpu, used), bool, count)
        is_plain &= (self.kinds >= 0) & ~np.fromiter(map(torch.Tensor.is_neg, used), bool, count)
        if is_plain.all():
            self.addresses = np.fromiter(map(torch.Tensor.data_ptr, used), np.int64, count)
        else:
            self.addresses = np.zeros(count, np.int64)
            listed = list(used)
            rows = np.flatnonzero(is_plain)
            self.addresses[rows] = [listed[row].data_ptr() for row in rows.tolist()]


def norms(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the L2 norms of gradients in another order, fp32 ``[m]`` on one of their devices; nothing waits."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    found = [torch.stack(torch._foreach_norm(same, 2, torch.float32)) for same in alike.values()]
    if not found:
        return torch.zeros(0, dtype=torch.float32, device="cpu")
    return torch.cat([each.to(found[0].device, non_blocking=True) for each in found])

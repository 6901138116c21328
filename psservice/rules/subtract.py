"""``θ −= p``: the rule of every method whose worker sends learning rate times direction."""

import numpy as np
import torch

from pscore.jit import compiled
from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode, Rejected
from psservice.rules.base import PLAIN, PushContext, UpdateRule
from psservice.rules.changed import ChangedIndices, changed_by

_LARGE = 1e30
"""Values up to here can take a parameter out of its range neither alone nor many of them in a lifetime."""

_LARGE_BITS = np.float32(_LARGE).view(np.int32)


class Subtract(UpdateRule):
    """``θ −= p``; without state."""

    kind = "subtract"

    def __init__(self, layout: ModelLayout, span: Span, theta: torch.Tensor) -> None:
        self._theta = theta

    def apply(self, push: SparseSlice | None, context: PushContext = PLAIN) -> ChangedIndices:
        """Subtract the push."""
        if push is None:
            return changed_by(None)
        if push.offsets is not None:
            self.overwrites(self._theta, push.offsets)
            fits = _subtract_at(self._theta, push.offsets, push.values)
        elif fits := not _is_large(push.values) or bool((self._theta - push.values).isfinite().all()):
            self.overwrites(self._theta, None)
            self._theta.sub_(push.values)
        if not fits:
            raise Rejected(ErrorCode.NON_FINITE, "this push would take a parameter out of the range of fp32")
        return changed_by(push)


def _subtract_at(theta: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> bool:
    """``θ[offsets] −= values``; False, with nothing changed, if fp32 has no result. Only large values are looked at."""
    if theta.is_cpu:
        return bool(subtract_at.on(offsets.numel())(theta.numpy(), offsets.numpy(), values.numpy()))
    left = theta[offsets] - values
    if _is_large(values) and not bool(left.isfinite().all()):
        return False
    theta[offsets] = left  # and no sum by atomics, which on CUDA flush subnormal numbers
    return True


def _is_large(values: torch.Tensor) -> bool:
    """Tell whether a magnitude is above the limit; without a copy, and on a device with one wait."""
    return values.numel() > 0 and bool(torch.stack(values.aminmax()).abs().amax() > _LARGE)


@compiled
def subtract_at(x, offsets, values):  # type: ignore[no-untyped-def]
    """``x[offsets] −= values``; False, with nothing changed, if a large value would make one infinite."""
    largest = np.int32(0)
    for bits in values.view(np.int32):  # those of magnitudes have their order, and are compared in vector instructions
        largest = max(largest, bits & np.int32(0x7FFFFFFF))
    if largest > _LARGE_BITS:
        for i in range(offsets.size):
            if not np.isfinite(x[offsets[i]] - values[i]):
                return False
    for i in range(offsets.size):
        x[offsets[i]] -= values[i]
    return True

"""``θ −= p``: the rule of every method whose worker sends learning rate times direction."""

import torch

from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.select.kernels import kernels_for
from pscore.select.kernels.base import LARGE, is_large
from pscore.wire.errors import ErrorCode, Rejected
from psservice.model.changelog import ChangedIndices, changed_by
from psservice.model.update.base import PLAIN, PushContext, UpdateRule


class Subtract(UpdateRule):
    """``θ −= p``; without state."""

    kind = "subtract"

    def __init__(self, layout: ModelLayout, span: Span, theta: torch.Tensor) -> None:
        self._theta = theta

    def apply(self, push: SparseSlice | None, context: PushContext = PLAIN) -> ChangedIndices:
        """Subtract the push."""
        if push is None or not push.entries:
            return changed_by(push)
        theta, values = self._theta, push.values
        if not theta.is_cpu:
            # Not by CUDA's atomics, which flush subnormal numbers: the bits are those of the host. One wait.
            place = slice(None) if push.offsets is None else push.offsets
            left = theta[place] - values
            fits = not bool((torch.stack(values.aminmax()).abs().amax() > LARGE) & ~left.isfinite().all())
            if fits:
                theta[place] = left
        elif push.offsets is not None:
            fits = kernels_for(theta).subtract_at(theta, push.offsets, values)
        elif fits := not is_large(values) or bool((theta - values).isfinite().all()):
            theta.sub_(values)
        if not fits:
            raise Rejected(ErrorCode.NON_FINITE, "this push would take a parameter out of the range of fp32")
        return changed_by(push)

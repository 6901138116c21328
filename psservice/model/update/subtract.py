"""``θ −= p``: the rule of every method whose worker sends learning rate times direction."""

import torch

from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.select.kernels import kernels_for
from pscore.wire.errors import ErrorCode, Rejected
from psservice.model.changelog import ChangedIndices, changed_by
from psservice.model.update.base import PLAIN, PushContext, UpdateRule

_LARGE = 1e30  # smaller values cannot take a parameter out of its range, nor can many of them in a lifetime


class Subtract(UpdateRule):
    """``θ −= p``; without state."""

    kind = "subtract"

    def __init__(self, layout: ModelLayout, span: Span, theta: torch.Tensor) -> None:
        self._theta = theta

    def apply(self, push: SparseSlice | None, context: PushContext = PLAIN) -> ChangedIndices:
        """Subtract the push."""
        if push is None:
            return changed_by(None)
        theta = self._theta
        if push.entries and bool(push.values.abs().max() > _LARGE):
            before = theta if push.offsets is None else theta[push.offsets]
            if not bool((before - push.values).isfinite().all()):
                raise Rejected(ErrorCode.NON_FINITE, "this push would take a parameter out of the range of fp32")
        if push.offsets is None:
            theta.sub_(push.values)
        else:
            kernels_for(theta).subtract_at(theta, push.offsets, push.values)
        return changed_by(push)

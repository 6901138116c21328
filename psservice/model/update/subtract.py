"""``θ −= p``: the rule of every method whose worker sends learning rate times direction."""

import torch

from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.selection.kernels import kernels_for
from pscore.selection.kernels.base import is_large
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
        if push is None:
            return changed_by(None)
        if push.offsets is not None:
            fits = kernels_for(self._theta).subtract_at(self._theta, push.offsets, push.values)
        elif fits := not is_large(push.values) or bool((self._theta - push.values).isfinite().all()):
            self._theta.sub_(push.values)
        if not fits:
            raise Rejected(ErrorCode.NON_FINITE, "this push would take a parameter out of the range of fp32")
        return changed_by(push)

"""``θ = p``: the rule of a feed, whose words are bits, and nothing is computed of them."""

import torch

from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from psservice.rules.base import PLAIN, PushContext, UpdateRule
from psservice.rules.changed import ChangedIndices, changed_by


class Assign(UpdateRule):
    """``θ = p`` at the elements that a push names; words are bits, and nothing is computed of them."""

    kind = "assign"

    def __init__(self, layout: ModelLayout, span: Span, theta: torch.Tensor) -> None:
        self._theta = theta

    def apply(self, push: SparseSlice | None, context: PushContext = PLAIN) -> ChangedIndices:
        """Assign the push."""
        if push is None:
            return changed_by(None)
        self.overwrites(self._theta, push.offsets)
        if push.offsets is None:
            self._theta.copy_(push.values)
        elif self._theta.is_cpu:  # numpy stays on this thread
            self._theta.numpy()[push.offsets.numpy()] = push.values.numpy()
        else:
            self._theta[push.offsets] = push.values
        return changed_by(push)

"""``θ −= p``: the rule of every method whose worker sends learning rate times direction."""

from collections.abc import Sequence

import torch

from pscore.model.sparse_slice import SparseSlice
from pscore.select.kernels import kernels_for
from pscore.wire.errors import ErrorCode, Rejected
from psservice.model.changelog import ChangedIndices, offset_dtype
from psservice.model.update.base import PLAIN, PushContext, RuleContext, RuleState
from psservice.model.update.reshard import RuleMemory

_LARGE = 1e30  # smaller values cannot take a parameter out of its range, nor can many of them in a lifetime


class Subtract:
    """``θ −= p``; nothing is kept."""

    rates: tuple[float, ...] = ()
    densifies = False

    def __init__(self, context: RuleContext) -> None:
        self._theta = context.theta
        self._offset_dtype = offset_dtype(context.span.length)

    def apply(self, push: SparseSlice | None, context: PushContext = PLAIN) -> ChangedIndices:
        """Subtract the push."""
        if push is None:
            return torch.empty(0, dtype=self._offset_dtype)
        theta = self._theta
        if push.entries and bool(push.values.abs().max() > _LARGE):
            before = theta if push.offsets is None else theta[push.offsets]
            if not bool((before - push.values).isfinite().all()):
                raise Rejected(ErrorCode.NON_FINITE, "this push would take a parameter out of the range of fp32")
        if push.offsets is None:
            theta.sub_(push.values)
            return None
        kernels_for(theta).subtract_at(theta, push.offsets, push.values)
        return push.offsets.to(self._offset_dtype)

    def export(self) -> RuleState:
        """Return nothing."""
        return RuleState()

    def restore(self, state: RuleState) -> None:
        """Do nothing."""

    def export_portable(self) -> RuleMemory:
        """Return nothing but the rule's kind."""
        return RuleMemory("subtract")

    def import_portable(self, memories: Sequence[RuleMemory]) -> None:
        """Do nothing."""

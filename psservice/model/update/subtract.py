"""``θ −= p``: the rule of every method whose worker sends learning rate times direction."""

from collections.abc import Sequence

import torch

from pscore.model.segment import Segment
from pscore.select.kernels import kernels_for
from pscore.wire.errors import ErrorCode, Rejected
from psservice.model.changelog import ChangedIndices
from psservice.model.update.base import PLAIN, Place, RuleState, StepInfo
from psservice.model.update.reshard import RuleMemory

_LARGE = 1e30  # smaller values cannot take a parameter out of its range, nor can many of them in a lifetime


class Subtract:
    """``θ −= p``."""

    rates: tuple[float, ...] = ()
    spreads = False

    def __init__(self, place: Place) -> None:
        """Work on these parameters."""
        self._theta = place.theta
        self._offset_dtype = torch.int32 if place.span.length < 2**31 else torch.int64

    def apply(self, push: Segment | None, info: StepInfo = PLAIN) -> ChangedIndices:
        """Subtract; what the push names has changed."""
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
        """Nothing is remembered."""
        return RuleState()

    def restore(self, state: RuleState) -> None:
        """Nothing is remembered."""

    def remember(self) -> RuleMemory:
        """Nothing is remembered."""
        return RuleMemory("subtract")

    def inherit(self, memories: Sequence[RuleMemory]) -> None:
        """Nothing is remembered."""

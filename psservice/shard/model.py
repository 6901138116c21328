"""The model shard: fp32 master parameters over one span of the flat layout, a version, and the ledger of what changed.

Every method that reads or writes ``theta`` is called on the writer thread (:mod:`psservice.shard.writer`) and on no
other, so each sees, and leaves behind, exactly one version.
"""

from dataclasses import dataclass

import torch

from pscore.layout import ModelLayout, Span
from pscore.reasons import Reason, Refusal
from pscore.segment import Segment
from psservice.rules.update import UpdateRule
from psservice.shard.ledger import Support, UpdateLedger, union


@dataclass(frozen=True, slots=True)
class Difference:
    """The values of a shard at one version, where they may differ from an older one.

    Attributes:
        version: whose values these are.
        support: offsets within the shard; ``None`` for every element.
        values: fp32 ``[k]``.
    """

    version: int
    support: Support
    values: torch.Tensor


class ModelShard:
    """Parameters of one span, their version, and their recent history.

    Args:
        layout: the whole model's layout.
        span: what this shard owns of it.
        values: initial values, fp32 ``[span.length]``; taken over, on the device where the shard is to live.
        generation: which upload this is.
        version: where to count from.
        ledger_multiple: entries that the ledger remembers, as a multiple of ``span.length``.
        update: the run's update rule.
    """

    def __init__(
        self,
        layout: ModelLayout,
        span: Span,
        values: torch.Tensor,
        *,
        generation: int,
        version: int,
        ledger_multiple: float,
        update: UpdateRule,
    ) -> None:
        """Take the values over."""
        self.layout = layout
        self.span = span
        self.generation = generation
        self.version = version
        self.theta = values
        self.ledger = UpdateLedger(span.length, max(1, int(ledger_multiple * span.length)), version)
        self._update = update
        self._offset_dtype = torch.int32 if span.length < 2**31 else torch.int64

    def apply(self, push: Segment | None) -> int:
        """Apply one push over the shard's span (``None``: it had no entries) and return the new version."""
        support = self.support_of(push)
        if push is not None:
            self._update(self.theta, push)
        # The ledger first: who reads beside the writer must not see a version of which the ledger does not know.
        self.ledger.append(self.version + 1, support)
        self.version += 1
        return self.version

    def support_of(self, push: Segment | None) -> Support:
        """Return what a push touches, as the ledger keeps it."""
        if push is None:
            return torch.empty(0, dtype=self._offset_dtype)
        return None if push.offsets is None else push.offsets.to(self._offset_dtype)

    def difference(self, early_version: int, early: Support) -> Difference:
        """Read the values at the current version wherever they changed since a base version.

        Args:
            early_version: a version between that base and now.
            early: union of the supports from the base to ``early_version``, prepared off the writer thread, so that
                only the few versions since then are added here.
        """
        support = early
        late = self.ledger.since(early_version)
        if support is not None and late != []:
            support = None if late is None else union([support, *late], self.span.length)
        values = self.theta.clone() if support is None else self.theta[support.to(self.theta.device)]
        return Difference(self.version, support, values)

    def rounded(self) -> torch.Tensor:
        """Return a copy of the parameters rounded to their own dtypes, as fp32: what an exact replica holds."""
        copy = self.theta.clone()
        for dtype, run in self.layout.dtype_runs(self.span):
            if dtype != torch.float32:
                view = copy[run.start - self.span.start : run.end - self.span.start]
                view.copy_(view.to(dtype))
        return copy

    def as_sent(self, support: Support, values: torch.Tensor) -> list[Segment]:
        """Cut values within the shard at changes of dtype and cast each piece to its parameters' dtype.

        Raises:
            Refusal: ``NON_FINITE``, where a parameter has left the range of its dtype.
        """
        if support is not None and not support.numel():
            return []
        whole = Segment(self.span, None if support is None else support.long(), values)
        pieces = []
        for dtype, run in self.layout.dtype_runs(self.span):
            piece = whole.clip(run)
            if piece is not None:
                rounded = piece.values.to(dtype)
                if dtype == torch.float16 and not bool(rounded.isfinite().all()):
                    raise Refusal(
                        Reason.NON_FINITE, f"parameters in [{run.start}, {run.end}) have left the range of float16"
                    )
                pieces.append(Segment(piece.span, piece.offsets, rounded))
        return pieces

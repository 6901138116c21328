"""The model shard: fp32 master parameters over one span of the flat layout, a version, and the log of changes.

Every method that reads or writes ``theta`` is called on the apply thread (:mod:`psservice.apply_thread`) and on no
other, so each sees, and leaves behind, exactly one version. Replies read ``theta`` beside that thread: a change is in
the log before its version is seen, so what was read too early is known (:mod:`psservice.replies.exact_reply`).
"""

import time
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Literal, Protocol, TypeAlias

import torch

from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.selection.cuda.launches import to_device
from pscore.telemetry.tracing import traced
from pscore.wire.errors import ErrorCode, Rejected
from psservice.memory_budget import Kept
from psservice.model.changelog import ChangeLog
from psservice.model.copies import CopyOnWrite, TensorCopy
from psservice.model.shared_results import SharedResults
from psservice.model.training_mode import TrainingMode
from psservice.model.undo_log import Overwritten, UndoLog
from psservice.rules.base import PLAIN, PushContext, RuleState
from psservice.rules.changed import ChangedIndices, changed_by
from psservice.settings import ShardSettings

_SPARSE = 0.25
"""Share of the elements up to which a push is one whose answer should not be dense."""


GroupDecision: TypeAlias = Literal["enter", "leave", "freeze"]
"""A worker takes part, or no longer, or a round freezes."""


class ModelPart(Protocol):
    """A part of a shard's model that has a state of its own."""

    def export(self) -> RuleState:
        """Return the state: the tensors themselves."""

    def restore(self, state: RuleState) -> None:
        """Restore an exported state; raises ``ValueError`` or ``KeyError`` if the state does not fit."""


@dataclass(eq=False)
class ModelShard:
    """Parameters of one span, their version, and their recent history; every push is applied as it comes.

    With rounds or groups a subclass is needed (:func:`psservice.durability.capture.shard_kind`).

    Raises :class:`Rejected` (``BAD_REQUEST``) if mode and model do not go together.

    Attributes:
        theta: fp32 ``[span.length]`` on the shard's device, not copied.
        version: counts from the version given.
        first_version: that with which the run began; above 0 with ``--init`` of another run's directory.
        clock: seconds, for models of rounds and groups.
        densified: whether the last update was sparse and changed everything.
        changes: odd while ``theta`` and version change, and another number after each change.
        replies: exact replies of the present version, which callers share.
        copies: the open copies of the parameters and of the state that :meth:`export` returns.
    """

    layout: ModelLayout
    span: Span
    theta: torch.Tensor
    _: KW_ONLY
    generation: int
    version: int
    settings: ShardSettings
    mode: TrainingMode
    clock: Callable[[], float] = time.monotonic
    first_version: int = 0
    copies: CopyOnWrite = field(default_factory=CopyOnWrite)

    def __post_init__(self) -> None:
        limit = max(1, int(self.settings.ledger_multiple * self.span.length))
        self.changelog = ChangeLog(self.span.length, limit, self.version)
        self.replies = SharedResults(4 * self.span.length)
        self.densified, self.changes = False, 0
        self.rule = self.mode.rule(self.layout, self.span, self.theta)
        self.rule.overwrites = self.copies.overwrites
        self._undo_log = UndoLog(limit) if self.settings.delay_compensation else None

    @traced("apply")
    def take(self, worker: str, push: SparseSlice | None, context: PushContext = PLAIN, step: int = 0) -> int:
        """Apply a worker's push, and return the version that has it.

        ``push`` is over the shard's span (``None``: no entries); ``step`` matters if each worker has its own model.
        Raises :class:`Rejected` (``NON_FINITE``, ``BAD_REQUEST``); nothing is changed then.
        """
        return self.apply(*self._ready(push, context))

    def _ready(self, push: SparseSlice | None, context: PushContext) -> tuple[SparseSlice | None, PushContext]:
        """Give a push the agreed rates if it has none, and compensate its delay; raises :class:`Rejected`."""
        rates, agreed = context.group_rates or self.rule.rates, self.rule.rates
        if len(rates) != len(agreed):
            raise Rejected(
                ErrorCode.BAD_REQUEST,
                f"a push brings {len(rates)} group_rates; the run's update rule has {len(agreed)}",
            )
        if rates != context.group_rates:
            context = replace(context, group_rates=rates)
        return None if push is None else self._corrected(push, context), context

    def version_after(self, base_version: int) -> int:
        """Return the version that the next push leads to, if it is computed at a base version."""
        return self.version + 1

    def apply(self, push: SparseSlice | None, context: PushContext = PLAIN, version: int | None = None) -> int:
        """Apply one update over the shard's span (``None``: it has no entries) and return the new version.

        That is the next one, or ``version``, which is higher.
        """
        before = self._overwritten(push) if self._undo_log is not None else None
        self.replies.clear()  # or what nobody reads any more would have its values kept
        self.changes += 1
        try:
            changed = self.rule.apply(push, context)
            self.densified = self.rule.densifies and push is not None and push.entries <= _SPARSE * self.span.length
            if self._undo_log is not None and before is not None:
                self._undo_log.append(before)
            return self._advance(changed, version)
        finally:
            self.changes += 1

    def waiting(self) -> set[str]:
        """Return the workers that are in an open round, or were dropped with one and have not contributed again."""
        return set()

    def begin_rounds_anew(self, dropped: Collection[str]) -> None:
        """Drop open rounds at a rollback; new ones do not wait for these workers until they have contributed again.

        Shards may have lost different parts of these workers' step; two workers would wait for each other for ever.
        """

    def close_round(self) -> int:
        """Apply the mean of the open round and return the new version; raises ``ValueError`` without rounds."""
        raise ValueError("the shard has no rounds")

    def decide(self, kind: GroupDecision, worker: str, incarnation: str = "", iteration: int = 0) -> None:
        """Change the groups, other than by a push; raises ``ValueError`` without groups, or if that makes no sense.

        ``incarnation`` is of a worker that enters, ``iteration`` of a round that freezes, in which ``worker`` has
        arrived.
        """
        raise ValueError("the shard has no groups")

    def open_values(self) -> TensorCopy:
        """Open a copy of the parameters, fp32 ``[span.length]``."""
        return self.copies.open(self.theta)

    @property
    def versions_name_values(self) -> bool:
        """Whether nothing but another version changes what :meth:`open_values` copies."""
        return True

    def publication_at(self, version: int) -> str:
        """Return the publication that a version of a feed is; empty if the run is no feed, or that is not known.

        It is the same text at all shards that have the same one, and at no others. From any thread.
        """
        return ""

    def changes_between(self, version: int, until: int) -> list[ChangedIndices] | None:
        """Return what the versions after ``version``, up to ``until``, have changed of what :meth:`open_values` copies.

        From any thread; ``None`` if that is not known.
        """
        return self.changelog.between(version, until)

    def current(self) -> torch.Tensor:
        """Return the parameters, fp32 ``[span.length]``."""
        with closing(self.open_values()) as values:
            return values.read(0, self.span.length)

    def kept(self) -> Kept:
        """Return what is kept for answers; from any thread."""
        return Kept(self.copies.nbytes, self.replies.occupied())

    @property
    def sum_bytes(self) -> int:
        """Bytes of the sums that are kept for late workers, if each has its own model; from any thread."""
        return 0

    def forget_replies(self) -> None:
        """Drop the replies that callers share; from any thread."""
        self.replies.clear()

    @property
    def first_step(self) -> int:
        """The lowest number that a new worker's first push should have."""
        return 1

    def finish(self) -> None:
        """End the run."""

    @property
    def versions_are_records(self) -> bool:
        """Whether each version is one push, or relayed version, and changed what that names."""
        return (self.mode.is_asynchronous or self.mode.is_relayed) and not self.rule.densifies

    def export(self) -> RuleState:
        """Return all that later versions depend on beside the parameters: the tensors themselves, to be copied."""
        states = {name: part.export() for name, part in self._parts().items()}
        return RuleState(
            {name: dict(state.plain) for name, state in states.items()},
            {f"{name}.{key}": tensor for name, state in states.items() for key, tensor in state.tensors.items()},
        )

    def restore(self, state: RuleState) -> None:
        """Restore an exported state; raises ``ValueError`` or ``KeyError`` if the state does not fit."""
        for name, part in self._parts().items():
            if name in state.plain:
                tensors = {n.removeprefix(f"{name}."): t for n, t in state.tensors.items() if n.startswith(f"{name}.")}
                # Counters stay on the host, where torch's optimizers keep them.
                on_device = {n: t.to(self.theta.device) if t.dim() else t for n, t in tensors.items()}
                part.restore(RuleState(state.plain[name], on_device))

    def _parts(self) -> dict[str, ModelPart]:
        parts: dict[str, ModelPart | None] = {"rule": self.rule, "past": self._undo_log}
        return {name: part for name, part in parts.items() if part is not None}

    def rounded(self, values: torch.Tensor, part: Span | None = None) -> torch.Tensor:
        """Round values of a part (fp32; all without it) to the parameters' dtypes, in place: an exact replica's."""
        part = part or self.span
        for dtype, run in self.layout.dtype_runs(part):
            if dtype != values.dtype:
                view = values[run.start - part.start : run.end - part.start]
                view.copy_(view.to(dtype))
        return values

    def as_sent(self, whole: SparseSlice) -> list[SparseSlice]:
        """Cut values at changes of dtype and cast each piece to its parameters' dtype (``NON_FINITE``)."""
        return rounded_slices(self.layout, whole)

    def _advance(self, changed: ChangedIndices, version: int | None = None) -> int:
        # The log first: a reader beside the apply thread must not see a version without its changes.
        version = self.version + 1 if version is None else version
        self.changelog.append(version, changed)
        self.version = version
        self.replies.clear()
        return self.version

    def _overwritten(self, push: SparseSlice | None) -> Overwritten:
        """Copy the values that an update will overwrite."""
        if push is not None and (push.offsets is None or self.rule.densifies):
            return Overwritten(self.version + 1, None, self.theta.clone())
        values = self.theta[push.offsets] if push is not None else self.theta[:0]
        return Overwritten(self.version + 1, changed_by(push), values)

    def _corrected(self, push: SparseSlice, context: PushContext) -> SparseSlice:
        """Compensate a push's delay: ``p + (λ/lr)·p⊙p⊙(θ_now − θ_base)``, equation 5 of DC-ASGD."""
        values = push.values
        if self._undo_log is not None and context.base_version is not None and context.learning_rate > 0:
            base = self._undo_log.at(self.theta, context.base_version, self.version, push.offsets)
            if base is not None:
                now = self.theta if push.offsets is None else self.theta[push.offsets]
                strength = self.settings.delay_compensation / context.learning_rate
                better = values + strength * values * values * (now - base)
                values = better if bool(better.isfinite().all()) else values
        return push if values is push.values else replace(push, values=values)


def on_device(update: SparseSlice | None, device: torch.device) -> SparseSlice | None:
    """Move an update from the host to where the parameters are, in one copy, for which nothing waits."""
    if update is None or update.values.device == device:
        return update
    arrays = [each.numpy() for each in (update.values, update.offsets) if each is not None]
    values, *offsets = to_device(arrays, device)
    return SparseSlice(update.span, offsets[0].view(torch.int64) if offsets else None, values.view(update.values.dtype))


def rounded_slices(layout: ModelLayout, whole: SparseSlice) -> list[SparseSlice]:
    """Cut values at changes of dtype and cast each piece to its parameters' dtype in a layout.

    Raises :class:`Rejected`: ``NON_FINITE``.
    """
    pieces = []
    for dtype, run in layout.dtype_runs(whole.span) if whole.entries else ():
        piece = whole.clip(run)
        if piece is not None:
            rounded = piece.values.to(dtype)
            if dtype != torch.float32 and not bool(rounded.isfinite().all()):
                name = str(dtype).removeprefix("torch.")
                raise Rejected(
                    ErrorCode.NON_FINITE, f"parameters in [{run.start}, {run.end}) have left the range of {name}"
                )
            pieces.append(SparseSlice(piece.span, piece.offsets, rounded))
    return pieces

"""The model shard: fp32 master parameters over one span of the flat layout, a version, and the ledger of what changed.

Every method that reads or writes ``theta`` is called on the writer thread (:mod:`psservice.shard.apply_thread`) and
on no other, so each sees, and leaves behind, exactly one version.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from pscore.model.layout import ModelLayout, Span
from pscore.model.segment import Segment
from pscore.telemetry.tracing import traced
from pscore.wire.errors import ErrorCode, Rejected
from psservice.model.changelog import ChangedIndices, UpdateLedger, union
from psservice.model.rounds import Round
from psservice.model.training_mode import TrainingMode
from psservice.model.undo_log import Overwritten, PastValues, compensated
from psservice.model.update.base import PLAIN, Place, RuleState, StepInfo
from psservice.model.update.reshard import RuleMemory

log = logging.getLogger(__name__)

_SPARSE = 0.25
"""Share of the elements up to which a push is one whose answer should not be dense."""


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """What a shard keeps beside its parameters.

    Attributes:
        ledger_multiple: entries that the ledger remembers, as a multiple of the shard's elements.
        delay_compensation: ``λ`` of DC-ASGD; where it is not 0, as many overwritten values are kept too.
    """

    ledger_multiple: float = 1.0
    delay_compensation: float = 0.0


@dataclass(frozen=True, slots=True)
class PushContext:
    """What the server makes of a push beside its entries.

    Attributes:
        factor: what it is multiplied by.
        base_version: what the gradient was taken at; ``None`` where that is of no interest.
        learning_rate: that the push carries; 0 where it is not known.
        samples: of the step; 0 where it is what a worker still held when it flushed, which counts for no round.
        group_rates: at which the update rule is to step its param groups; empty for those agreed.
    """

    factor: float = 1.0
    base_version: int | None = None
    learning_rate: float = 0.0
    samples: int = 1
    group_rates: tuple[float, ...] = ()


NO_CORRECTION = PushContext()


@dataclass(frozen=True, slots=True)
class Difference:
    """The values of a shard at one version, where they may differ from an older one.

    Attributes:
        version: whose values these are.
        support: offsets within the shard; ``None`` for every element.
        values: fp32 ``[k]``.
    """

    version: int
    support: ChangedIndices
    values: torch.Tensor


class ModelShard:
    """Parameters of one span, their version, and their recent history.

    Args:
        layout: the whole model's layout.
        span: what this shard owns of it.
        values: initial values, fp32 ``[span.length]``; taken over, on the device where the shard is to live.
        generation: which upload this is.
        version: where to count from.
        settings: what is kept.
        regime: how updates are taken.

    Raises:
        Refusal: ``BAD_REQUEST``, where regime and model do not go together.

    Attributes:
        settings: what is kept.
        round: the open round; ``None`` where training is asynchronous.
        spread: whether the last update came sparse and changed everything.
    """

    def __init__(
        self,
        layout: ModelLayout,
        span: Span,
        values: torch.Tensor,
        *,
        generation: int,
        version: int,
        settings: ShardSettings,
        regime: TrainingMode,
    ) -> None:
        """Take the values over."""
        self.layout = layout
        self.span = span
        self.generation = generation
        self.version = version
        self.theta = values
        limit = max(1, int(settings.ledger_multiple * span.length))
        self.ledger = UpdateLedger(span.length, limit, version)
        self.spread = False
        self.round = Round(span, values.device) if regime.rounds is not None else None
        self._rule = regime.rule(Place(layout, span, values))
        self.settings = settings
        self._compensation = settings.delay_compensation
        self._past = PastValues(limit) if settings.delay_compensation else None
        self._offset_dtype = torch.int32 if span.length < 2**31 else torch.int64

    @traced("apply")
    def take(self, worker: str, push: Segment | None, correction: PushContext = NO_CORRECTION, step: int = 0) -> int:
        """Take a push in: apply it, or add it to the open round.

        Args:
            worker: whose.
            push: over the shard's span; ``None``: it had no entries.
            correction: what is done to it before.
            step: its number; of interest where each worker has a model of its own.

        Returns:
            The version that has it, which with a round is the one after its close.

        Raises:
            Refusal: ``NON_FINITE``, or ``BAD_REQUEST`` where its rates are not one a param group; nothing is changed.
        """
        info = StepInfo(correction.group_rates or self._rule.rates, correction.samples)
        if len(info.rates) != len(self._rule.rates):
            raise Rejected(
                ErrorCode.BAD_REQUEST,
                f"a push brings {len(info.rates)} group_rates; the run's update rule has {len(self._rule.rates)}",
            )
        if push is not None:
            push = self._corrected(push, correction)
        if self.round is None:
            return self.apply(push, info)
        self.round.add(worker, push, info)
        return self.version + 1

    def apply(self, push: Segment | None, info: StepInfo = PLAIN) -> int:
        """Apply one update over the shard's span (``None``: it has no entries) and return the new version."""
        before = None if self._past is None else self._before(push)
        support = self._rule.apply(push, info)
        self.spread = self._rule.spreads and push is not None and push.entries <= _SPARSE * self.span.length
        if self._past is not None and before is not None:
            self._past.note(before)
        return self._advance(support)

    def close_round(self) -> int:
        """Apply the mean of the open round and return the new version.

        A mean that would take a parameter out of its range is dropped: those who contributed were told that it counts,
        and nobody is left to refuse it to.
        """
        assert self.round is not None
        try:
            version = self.apply(*self.round.close())
        except Rejected as error:
            log.error("a round was dropped", extra={"version": self.version + 1, "why": str(error)})
            version = self._advance(self.support_of(None))
        self.round.open_next()
        return version

    def waiting(self) -> set[str]:
        """Return the workers that are in an open round, or were dropped with it and have not come again."""
        return set() if self.round is None else self.round.contributors | self.round.away

    def begin_rounds_anew(self, away: Collection[str]) -> None:
        """Drop open rounds, and wait in new ones for none of these workers until it has come again.

        For a shard that goes back, with those who were waiting there: each shard may have lost another part of their
        step, and two of them would wait for one another at two shards for ever.
        """
        if self.round is not None:
            self.round.begin_anew(away)

    def current(self) -> torch.Tensor:
        """Return a copy of the parameters, fp32 ``[span.length]``."""
        return self.theta.clone()

    @property
    def first_step(self) -> int:
        """The lowest number that a new worker's first push should have."""
        return 1

    def finish(self) -> None:
        """Take note that the run is over."""

    def support_of(self, push: Segment | None) -> ChangedIndices:
        """Return what a push names, as the ledger keeps it."""
        if push is None:
            return torch.empty(0, dtype=self._offset_dtype)
        return None if push.offsets is None else push.offsets.to(self._offset_dtype)

    @property
    def is_asynchronous(self) -> bool:
        """Whether pushes are applied to the one model as they come, so that staleness is what it is called."""
        return self.round is None

    @property
    def versions_are_pushes(self) -> bool:
        """Whether each version is one push and changed what that push names."""
        return self.round is None and not self._rule.spreads

    def export(self) -> RuleState:
        """Copy everything that later versions depend on beside the parameters."""
        parts = {"rule": self._rule.export()}
        if self.round is not None:
            parts["round"] = self.round.export()
        if self._past is not None:
            parts["past"] = self._past.export()
        return RuleState(
            {name: dict(state.plain) for name, state in parts.items()},
            {f"{name}.{key}": tensor for name, state in parts.items() for key, tensor in state.tensors.items()},
        )

    def restore(self, state: RuleState) -> None:
        """Take over what :meth:`export` returned; raises ``ValueError`` or ``KeyError`` where it does not fit."""
        device = self.theta.device

        def part(name: str) -> RuleState:
            prefix = f"{name}."
            found = {n.removeprefix(prefix): t for n, t in state.tensors.items() if n.startswith(prefix)}
            # Counters stay on the host, where torch's optimizers keep them.
            return RuleState(state.plain[name], {n: t.to(device) if t.dim() else t for n, t in found.items()})

        if "rule" in state.plain:
            self._rule.restore(part("rule"))
        if self.round is not None and "round" in state.plain:
            self.round.restore(part("round"))
        if self._past is not None and "past" in state.plain:
            self._past.restore(part("past"), device)

    def remember(self) -> RuleMemory:
        """Return what the update rule remembers, for shards that are cut in other places."""
        return self._rule.remember()

    def inherit(self, memories: Sequence[RuleMemory]) -> bool:
        """Take over what the update rules of all shards of another run remember; False where theirs is another one."""
        if {memory.kind for memory in memories} != {self._rule.remember().kind}:
            return False
        self._rule.inherit(memories)
        return True

    def _advance(self, support: ChangedIndices) -> int:
        # The ledger first: who reads beside the writer must not see a version of which the ledger does not know.
        self.ledger.append(self.version + 1, support)
        self.version += 1
        return self.version

    def _before(self, push: Segment | None) -> Overwritten:
        """Copy what an update is about to overwrite."""
        if push is not None and (push.offsets is None or self._rule.spreads):
            return Overwritten(self.version + 1, None, self.theta.clone())
        values = self.theta[push.offsets] if push is not None else self.theta[:0]
        return Overwritten(self.version + 1, self.support_of(push), values)

    def _corrected(self, push: Segment, correction: PushContext) -> Segment:
        values = push.values if correction.factor == 1 else push.values * correction.factor
        if self._past is not None and correction.base_version is not None and correction.learning_rate > 0:
            base = self._past.at(self.theta, correction.base_version, self.version, push.offsets)
            if base is not None:
                now = self.theta if push.offsets is None else self.theta[push.offsets]
                values = compensated(values, now, base, self._compensation, correction.learning_rate)
        return push if values is push.values else replace(push, values=values)

    def difference(self, early_version: int, early: ChangedIndices) -> Difference:
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

    def as_sent(self, whole: Segment) -> list[Segment]:
        """Cut values within the shard at changes of dtype and cast each piece to its parameters' dtype.

        Raises:
            Refusal: ``NON_FINITE``, where a parameter has left the range of its dtype.
        """
        if not whole.entries:
            return []
        pieces = []
        for dtype, run in self.layout.dtype_runs(self.span):
            piece = whole.clip(run)
            if piece is not None:
                rounded = piece.values.to(dtype)
                if dtype == torch.float16 and not bool(rounded.isfinite().all()):
                    raise Rejected(
                        ErrorCode.NON_FINITE, f"parameters in [{run.start}, {run.end}) have left the range of float16"
                    )
                pieces.append(Segment(piece.span, piece.offsets, rounded))
        return pieces

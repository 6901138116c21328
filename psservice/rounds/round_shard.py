"""A shard that trains in synchronous rounds: the model, and the round that is open."""

import logging
from collections.abc import Collection

from pscore.model.sparse_slice import SparseSlice
from pscore.telemetry.tracing import traced
from pscore.wire.errors import Rejected
from psservice.model.parameters import ModelPart, ModelShard
from psservice.rounds.expected import ExpectedWorkers
from psservice.rounds.round import SynchronousRound
from psservice.rules.base import PLAIN, PushContext
from psservice.rules.changed import changed_by

log = logging.getLogger(__name__)


class RoundShard(ModelShard):
    """Parameters that change when a round closes.

    Attributes:
        round: the open one.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.mode.rounds is not None
        self.round = SynchronousRound(
            self.mode.rounds, self.span, self.theta.device, self.clock, self.copies.overwrites
        )

    @traced("apply")
    def take(self, worker: str, push: SparseSlice | None, context: PushContext = PLAIN, step: int = 0) -> int:
        """Add a worker's push to the open round, and return the version that will have it; raises as its base does."""
        self.round.add(worker, *self._ready(push, context))
        return self.version + 1

    def close_round(self) -> int:
        """Apply the mean of the open round and return the new version.

        A mean that would take a parameter out of its range is dropped: no contributor's call is left to refuse.
        """
        try:
            version = self.apply(*self.round.close())
        except Rejected as error:
            log.error("a round was dropped", extra={"version": self.version + 1, "why": str(error)})
            version = self._advance(changed_by(None))
        self.round.open_next()
        return version

    def expected_workers(self, longest: float) -> ExpectedWorkers | None:
        """Return what tells for whom rounds wait, ``longest`` seconds at first; ``None`` if for all live workers."""
        factor = self.round.settings.wait_factor
        return ExpectedWorkers(factor, longest, self.clock) if factor else None

    def waiting(self) -> set[str]:
        """Return the workers that are in the open round, or were dropped with one and have not contributed again."""
        return self.round.contributors | self.round.dropped

    def begin_rounds_anew(self, dropped: Collection[str]) -> None:
        """Drop the open round; new ones do not wait for these workers until they have contributed again."""
        self.round.begin_anew(dropped)

    def _parts(self) -> dict[str, ModelPart]:
        return {**super()._parts(), "round": self.round}

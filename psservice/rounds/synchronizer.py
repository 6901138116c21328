"""When the rounds of a shard close, and who waits for that.

Each shard decides for itself. The close of a round is a record of the journal.
"""

import math
from dataclasses import dataclass

from pscore.wire.errors import ErrorCode
from psservice.awaiting import NotYetError
from psservice.rounds.expected import ExpectedWorkers
from psservice.rounds.round_shard import RoundShard
from psservice.state.v1 import journal_pb2 as rec
from psservice.synchronizer import Synchronizer


@dataclass(frozen=True)
class RoundSynchronizer(Synchronizer):
    """Synchronous rounds: closed by a push, by the death of the worker that a round waits for, or by the clock.

    ``expected``: whom rounds wait for; ``None`` if for all live workers.
    """

    model: RoundShard
    expected: ExpectedWorkers | None = None

    @property
    def _is_first(self) -> bool:
        """Whether no round of the run was closed yet."""
        return self.model.version == self.model.first_version

    def is_due(self) -> bool:
        """Apply the rule of the run's settings."""
        live = self._live()
        awaited = live if self.expected is None else self.expected.of(live)
        return self.model.round.is_due(live, awaited, is_first=self._is_first)

    def pushed(self, worker: str) -> None:
        """Note the contribution that the push was, unless it was a flush, and close the round if it is due."""
        if self.expected is not None and worker in self.model.round.contributors:
            self.expected.contributed(worker)
        super().pushed(worker)

    def _live(self) -> list[str]:
        return [member.identity.worker_id for member in self.leases.members() if member.makes_pushes]

    def close(self) -> None:
        """Apply the mean of the open round, if anything is in it."""
        if not self.model.round.contributors and self.model.round.is_empty:
            return
        contributors = self.model.round.contributors
        self.metrics.round_contributors.observe(len(contributors))
        self.commit(rec.RoundClosed(version=self.model.version + 1))
        if self.expected is not None:
            self.expected.closed(contributors, self._live())
        self.metrics.version = self.model.version

    def require_closed(self, worker: str) -> None:
        """Refuse contributors to the open round."""
        if worker in self.model.round.contributors:
            awaited = math.inf if self.expected is None else self.expected.seconds_left
            raise NotYetError(
                ErrorCode.ROUND_OPEN,
                f"the round of version {self.model.version + 1} has {len(self.model.round.contributors)} contributions "
                f"and waits for others; live workers: {len(self.leases)}"
                + (", and the first round waits for start_workers of them" if self._is_first else ""),
                lambda: worker not in self.model.round.contributors,
                again_seconds=self.model.round.seconds_left(self._live(), awaited, is_first=self._is_first),
            )

"""What synchronizes the pushes of several workers: rounds, or the groups of WAGMA-SGD.

An asynchronous run has no synchronizer. Each shard decides for itself. A decision is a record of the journal. A call
whose round is open waits, without a thread, for the round's close (:mod:`psservice.awaiting`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from psservice.apply_thread import ApplyThread
from psservice.membership.leases import Leases, Member
from psservice.model.parameters import ModelShard
from psservice.observability.metrics import Metrics
from psservice.state.records import Record
from psservice.values import Identity


@dataclass(frozen=True)
class Synchronizer:
    """What rounds and groups have in common; the subclasses override what differs.

    :meth:`require_acceptable`, :meth:`pushed`, :meth:`close_if_due` and :meth:`close` run on the apply thread. A
    refusal is ``ROUND_OPEN`` if a worker has to wait for a round, else ``BAD_REQUEST`` or ``NOT_DURABLE``.
    """

    model: ModelShard
    leases: Leases
    commit: Callable[[Record], object]
    apply_thread: ApplyThread
    metrics: Metrics

    def require_turn(self, identity: Identity) -> None:
        """Refuse a push that comes before its worker's turn."""

    def require_acceptable(self, identity: Identity, step: int) -> None:
        """Refuse a push that the round cannot take."""

    def pushed(self, worker: str) -> None:
        """Close what a worker's push has made due; the push is committed."""
        self.close_if_due()

    def is_due(self) -> bool:
        """Tell whether a round is due that no call of a worker will close; never with WAGMA."""
        return False

    def close_if_due(self) -> None:
        """Close rounds that are due."""
        if self.is_due():
            self.close()

    def close(self) -> None:
        """Close the open round with what is there."""

    def require_closed(self, worker: str) -> None:
        """Refuse a worker's pull that has to wait for a round."""

    def model_for(self, member: Member, base_version: int | None, acknowledged: int) -> tuple[ModelShard, int | None]:
        """Return the model of which a pull is answered, and the replica's version of that."""
        return self.model, base_version

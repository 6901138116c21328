"""When workers enter and leave the groups of WAGMA-SGD, when rounds freeze, and who waits for that.

Each shard decides for itself. A decision is a record of the journal.
"""

from collections.abc import Callable
from dataclasses import dataclass

from pscore.wire.errors import ErrorCode, Rejected
from psservice.awaiting import NotYetError
from psservice.membership.leases import Member
from psservice.model.parameters import ModelShard
from psservice.state.records import worker_of
from psservice.state.v1 import journal_pb2 as rec
from psservice.synchronizer import Synchronizer
from psservice.values import Identity
from psservice.wagma.group_rounds import Frozen
from psservice.wagma.replicas import GroupedShard, Replica

_NO_ROOM_SECONDS = 0.5  # after which it is asked again whether there is room for the sums of a round that is due
_MOST_STEP_AHEAD = 1 << 32
"""Iterations that one push of WAGMA may be ahead of the newest: newcomers begin behind it."""


@dataclass(frozen=True)
class WagmaSynchronizer(Synchronizer):
    """WAGMA-SGD: a model a worker, averaged in groups; workers enter at their first push or pull.

    A round freezes without some members only if there is room for the sums that are kept for these. Else it waits for
    them, as a global round does.

    Attributes:
        has_room: tells whether so many bytes more may be kept.
    """

    model: GroupedShard
    has_room: Callable[[int], bool]

    def require_turn(self, identity: Identity) -> None:
        """Refuse a push while its worker's round is open."""
        self.apply_thread.run(lambda: self._enter(identity))

    def require_acceptable(self, identity: Identity, step: int) -> None:
        """Enter a new worker, and refuse a push that would bring new workers near the end of all steps."""
        self._enter(identity)
        first_step = self.model.first_step
        if step > first_step + _MOST_STEP_AHEAD:
            raise Rejected(
                ErrorCode.BAD_REQUEST,
                f"step is {step}; it must be {first_step + _MOST_STEP_AHEAD} at most, as the newest iteration is "
                f"that of step {first_step - 1}",
            )

    def close_if_due(self) -> None:
        """Freeze the rounds that are due."""
        while (frozen := self.model.rounds.due(self._fits)) is not None:
            self.metrics.round_contributors.observe(len(frozen.fresh))
            self._decide(rec.GroupDecided.KIND_FREEZE, frozen.fresh[0], iteration=frozen.iteration)

    def model_for(self, member: Member, base_version: int | None, acknowledged: int) -> tuple[ModelShard, int | None]:
        """Return the worker's own model; without a base until the worker has acknowledged a reply from that model."""

        def enter() -> Replica:
            self._enter(member.identity)
            return self.model.replicas[member.identity.worker_id]

        replica = self.apply_thread.run(enter)
        if model_id := replica.unsynced:
            if not member.downlink.has_acknowledged(model_id, acknowledged):
                return replica.model, None
            replica.unsynced = 0
        return replica.model, base_version

    def _fits(self, frozen: Frozen) -> bool:
        nbytes = self.model.bytes_to_freeze(frozen)
        return not nbytes or self.has_room(nbytes)

    def _enter(self, identity: Identity) -> None:
        """Remove dead workers, enter this one, and raise :class:`Rejected` (``ROUND_OPEN``) if its round is open."""
        model, live = self.model, self.leases.identities()
        for worker, replica in [*model.replicas.items()]:
            if Identity(worker, replica.incarnation) not in live:
                self._decide(rec.GroupDecided.KIND_LEAVE, worker)
        if identity.worker_id not in model.replicas:
            self._decide(rec.GroupDecided.KIND_ENTER, identity.worker_id, identity.incarnation)
        self.close_if_due()
        waiting = model.rounds.waits(identity.worker_id)
        if waiting is not None:
            lacks_room = model.rounds.is_due(waiting)  # or it would be frozen
            raise NotYetError(
                ErrorCode.ROUND_OPEN,
                f"iteration {waiting.iteration} waits for {len(waiting.members) - len(waiting.fresh)} of "
                f"{len(waiting.members)} workers"
                + (", because --memory-bytes has no room for the sums that late workers need" if lacks_room else ""),
                lambda: model.rounds.waits(identity.worker_id) is not waiting or self.leases.identities() != live,
                again_seconds=_NO_ROOM_SECONDS if lacks_room else model.rounds.seconds_left(waiting),
            )

    def _decide(
        self, kind: "rec.GroupDecided.Kind.ValueType", worker: str, incarnation: str = "", iteration: int = 0
    ) -> None:
        self.commit(rec.GroupDecided(kind=kind, worker=worker_of(Identity(worker, incarnation)), iteration=iteration))

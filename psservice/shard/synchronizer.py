"""How the pushes of several workers are synchronized: in rounds, or in the groups of WAGMA-SGD.

An asynchronous run has no synchronizer. Each shard decides for itself. A decision is a record of the journal. A call
whose round is open waits, without a thread, for the round's close (:mod:`psservice.awaiting`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from pscore.wire.errors import ErrorCode, Rejected
from psservice.apply_thread import ApplyThread
from psservice.awaiting import NotYetError
from psservice.membership.leases import Leases, Member
from psservice.model.parameters import ModelShard
from psservice.model.synchronous_rounds import SynchronousRound
from psservice.model.wagma.group_rounds import Frozen
from psservice.model.wagma.replicas import GroupedShard, Replica
from psservice.observability.metrics import Metrics
from psservice.state.records import Record, worker_of
from psservice.state.v1 import journal_pb2 as rec
from psservice.values import Identity

_NO_ROOM_SECONDS = 0.5  # after which it is asked again whether there is room for the sums of a round that is due
_MOST_STEP_AHEAD = 1 << 32
"""Iterations that one push of WAGMA may be ahead of the newest: newcomers begin behind it."""


@dataclass(frozen=True)
class Synchronizer:
    """What rounds and groups have in common; the subclasses override what differs.

    :meth:`require_acceptable`, :meth:`close_if_due` and :meth:`close` run on the apply thread. A refusal is
    ``ROUND_OPEN`` if a worker has to wait for a round, else ``BAD_REQUEST`` or ``NOT_DURABLE``.
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


@dataclass(frozen=True)
class RoundSynchronizer(Synchronizer):
    """Synchronous rounds: closed by a push, by the death of the worker that a round waits for, or by the clock."""

    open_round: SynchronousRound

    @property
    def _is_first(self) -> bool:
        """Whether no round of the run was closed yet."""
        return self.model.version == self.model.first_version

    def is_due(self) -> bool:
        """Apply the rule of the run's settings."""
        return self.open_round.is_due(self._live(), is_first=self._is_first)

    def _live(self) -> list[str]:
        return [member.identity.worker_id for member in self.leases.members() if member.makes_pushes]

    def close(self) -> None:
        """Apply the mean of the open round, if anything is in it."""
        if not self.open_round.contributors and self.open_round.is_empty:
            return
        self.metrics.round_contributors.observe(len(self.open_round.contributors))
        self.commit(rec.RoundClosed(version=self.model.version + 1))
        self.metrics.version = self.model.version

    def require_closed(self, worker: str) -> None:
        """Refuse contributors to the open round."""
        if worker in self.open_round.contributors:
            raise NotYetError(
                ErrorCode.ROUND_OPEN,
                f"the round of version {self.model.version + 1} has {len(self.open_round.contributors)} contributions "
                f"and waits for others; live workers: {len(self.leases)}"
                + (", and the first round waits for start_workers of them" if self._is_first else ""),
                lambda: worker not in self.open_round.contributors,
                again_seconds=self.open_round.seconds_left(self._live(), is_first=self._is_first),
            )


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


def synchronizer_for(
    model: ModelShard,
    leases: Leases,
    commit: Callable[[Record], object],
    apply_thread: ApplyThread,
    metrics: Metrics,
    has_room: Callable[[int], bool],
) -> Synchronizer | None:
    """Return the synchronizer that a model needs; ``None`` if every push is applied as it comes."""
    parts = (leases, commit, apply_thread, metrics)
    if isinstance(model, GroupedShard):
        return WagmaSynchronizer(model, *parts, has_room)
    if model.round is not None:
        return RoundSynchronizer(model, *parts, model.round)
    return None

"""How the pushes of several workers are coordinated: not at all, in synchronous rounds, or in WAGMA-SGD's groups.

Each shard decides for itself. A decision is journaled before it is made. No call waits for another worker: a worker
whose round is open asks again.
"""

from dataclasses import dataclass

from pscore.wire.errors import ErrorCode, Rejected
from psservice.apply_thread import Writer
from psservice.cluster.leases import Leases
from psservice.cluster.member import Member
from psservice.model.parameters import ModelShard
from psservice.model.rounds import Round, RoundSettings
from psservice.model.wagma.replicas import GroupedShard
from psservice.model.wagma.rounds import Decision
from psservice.observability.metrics import Metrics
from psservice.recovery.event_log import EventLog
from psservice.types import Identity

_MOST_STEP_AHEAD = 1 << 32
"""Iterations that one push of WAGMA may be ahead of the newest: newcomers begin behind it."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a shard that coordinate."""

    leases: Leases
    events: EventLog
    writer: Writer
    metrics: Metrics


class Coordinator:
    """Asynchronous training: every push is applied as it comes. The other forms override what differs."""

    def __init__(self, model: ModelShard) -> None:
        self.model = model

    def require_turn(self, identity: Identity) -> None:
        """Raise :class:`Rejected` (``ROUND_OPEN``) where a push comes before its worker's turn; from any thread."""

    def admit(self, identity: Identity, step: int) -> None:
        """Admit a push; on the writer thread. Raises :class:`Rejected` (``ROUND_OPEN``, ``BAD_REQUEST``)."""

    def is_due(self) -> bool:
        """Tell, from any thread, whether :meth:`close_if_due` would close a round."""
        return False

    def close_if_due(self) -> None:
        """Close rounds that are due; on the writer thread. Raises :class:`Rejected` (``NOT_DURABLE``)."""

    def close(self) -> None:
        """Close the open round with what is there; on the writer thread."""

    def require_closed(self, worker: str) -> None:
        """Raise :class:`Rejected` (``ROUND_OPEN``) where a worker's pull has to wait for a round."""

    def seen_by(self, member: Member, base_version: int | None, acknowledged: int) -> tuple[ModelShard, int | None]:
        """Return the model of which a pull is answered, and the replica's version of that (``ROUND_OPEN``)."""
        return self.model, base_version


class RoundCoordinator(Coordinator):
    """Synchronous rounds: closed by a push, by the death of the worker that a round waits for, or by the clock."""

    def __init__(self, model: ModelShard, open_round: Round, settings: RoundSettings, parts: Parts) -> None:
        super().__init__(model)
        self._round, self._settings, self._parts = open_round, settings, parts

    def is_due(self) -> bool:
        """Apply the rule of the run's settings."""
        live = [member.identity.worker_id for member in self._parts.leases.members() if not member.has_no_samples]
        now, first = self._round, self.model.version == 0
        return self._settings.is_due(now.contributors, live, now.age_seconds, first=first, dropped=now.dropped)

    def close_if_due(self) -> None:
        """Close the round where it is due."""
        if self.is_due():
            self.close()

    def close(self) -> None:
        """Apply the mean of the open round, if anything is in it."""
        if not self._round.contributors and self._round.is_empty:
            return
        self._parts.metrics.round_contributors.observe(len(self._round.contributors))
        self._parts.events.closed_round(self.model.version + 1)
        with self._parts.writer.all_or_stop():
            version = self.model.close_round()
        self._parts.metrics.version.set(version)

    def require_closed(self, worker: str) -> None:
        """Refuse contributors to the open round."""
        if worker in self._round.contributors:
            raise Rejected(
                ErrorCode.ROUND_OPEN,
                f"the round of version {self.model.version + 1} has {len(self._round.contributors)} contributions and "
                f"waits for others; live workers: {len(self._parts.leases)}"
                + (", and the first round waits for start_workers of them" if self.model.version == 0 else ""),
                retry_seconds=self._round.retry_seconds,
            )


class WagmaCoordinator(Coordinator):
    """WAGMA-SGD: a model a worker, averaged in groups; workers enter at their first push or pull."""

    def __init__(self, model: GroupedShard, parts: Parts) -> None:
        super().__init__(model)
        self._grouped, self._parts = model, parts

    def require_turn(self, identity: Identity) -> None:
        """Refuse a push while its worker's round is open."""
        self._parts.writer.run(lambda: self._enter(identity))

    def admit(self, identity: Identity, step: int) -> None:
        """Enter a new worker, and refuse a push that would bring new workers near the end of all steps."""
        self._enter(identity)
        first_step = self._grouped.first_step
        if step > first_step + _MOST_STEP_AHEAD:
            raise Rejected(
                ErrorCode.BAD_REQUEST,
                f"step is {step}; it must be {first_step + _MOST_STEP_AHEAD} at most, as the newest iteration is "
                f"that of step {first_step - 1}",
            )

    def close_if_due(self) -> None:
        """Freeze the rounds that are due."""
        while (frozen := self._grouped.rounds.due()) is not None:
            self._parts.metrics.round_contributors.observe(len(frozen.fresh))
            self._decide(Decision("freeze", frozen.fresh[0], iteration=frozen.iteration))

    def seen_by(self, member: Member, base_version: int | None, acknowledged: int) -> tuple[ModelShard, int | None]:
        """Return the worker's own model; without a base until the worker has acknowledged a reply from that model."""
        worker = member.identity.worker_id

        def enter() -> ModelShard:
            self._enter(member.identity)
            return self._grouped.seen_by(worker)

        own = self._parts.writer.run(enter)
        model_id = self._grouped.unsynced.get(worker)
        if model_id is not None:
            if not member.downlink.has_acknowledged(model_id, acknowledged):
                return own, None
            self._grouped.unsynced.pop(worker, None)
        return own, base_version

    def _enter(self, identity: Identity) -> None:
        """Remove dead workers, enter this one, and raise :class:`Rejected` (``ROUND_OPEN``) where its round is open."""
        model, live = self._grouped, {each.identity for each in self._parts.leases.members()}
        for worker, incarnation in [*model.incarnations.items()]:
            if Identity(worker, incarnation) not in live:
                self._decide(Decision("leave", worker))
        if identity.worker_id not in model.incarnations:
            self._decide(Decision("enter", identity.worker_id, identity.incarnation))
        self.close_if_due()
        waiting = model.rounds.waits(identity.worker_id)
        if waiting is not None:
            raise Rejected(
                ErrorCode.ROUND_OPEN,
                f"iteration {waiting.iteration} waits for {len(waiting.members) - len(waiting.fresh)} of "
                f"{len(waiting.members)} workers",
                retry_seconds=model.rounds.retry_seconds(waiting),
            )

    def _decide(self, decision: Decision) -> None:
        self._parts.events.decided(decision)
        with self._parts.writer.all_or_stop():
            self._grouped.decide(decision)


def coordinator_for(model: ModelShard, parts: Parts) -> Coordinator:
    """Return the form of coordination that a model needs."""
    if isinstance(model, GroupedShard):
        return WagmaCoordinator(model, parts)
    if model.round is not None and model.mode.rounds is not None:
        return RoundCoordinator(model, model.round, model.mode.rounds, parts)
    return Coordinator(model)

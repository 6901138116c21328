"""Keeping WAGMA-SGD's groups: who takes part, which rounds freeze, who waits, and from which model each is answered.

Every decision is written down before it is done (:class:`~psservice.model.wagma.rounds.Decision`). They are made
where a worker pushes or asks; nobody in a call waits for another: whoever's round is open asks again.
"""

from pscore.wire.errors import ErrorCode, Rejected
from psservice.cluster.leases import Identity, Member, Membership
from psservice.model.parameters import ModelShard
from psservice.model.wagma.replicas import GroupedShard
from psservice.model.wagma.rounds import Decision
from psservice.observability.metrics import Metrics
from psservice.recovery.event_log import EventLog
from psservice.shard.apply_thread import Writer

_MOST_STEP_AHEAD = 1 << 32  # iterations that one push of WAGMA may be ahead of the newest: new workers begin there


class WagmaCoordinator:
    """Decides for one shard; each shard for itself. Where workers share one model, its calls do nothing.

    Args:
        membership: who is alive.
        events: a decision is written down before it is done.
        writer: where it is done.
        metrics: told of rounds.
    """

    def __init__(self, membership: Membership, events: EventLog, writer: Writer, metrics: Metrics) -> None:
        """Nothing is decided."""
        self._membership, self._events, self._writer, self._metrics = membership, events, writer, metrics

    def require_turn(self, model: ModelShard | None, identity: Identity) -> None:
        """Refuse a push at its header that comes while its worker's round is open; from any thread.

        Raises:
            Refusal: ``ROUND_OPEN``.
        """
        if isinstance(model, GroupedShard):
            self._writer.run(lambda: self.admit(model, identity))

    def admit(self, model: ModelShard, identity: Identity) -> None:
        """Take a worker in that is new, and see that no round is open for it; on the writer thread.

        Raises:
            Refusal: ``ROUND_OPEN``; ``NOT_DURABLE``.
        """
        if not isinstance(model, GroupedShard):
            return
        self._follow_members(model, identity)
        self.freeze_due(model)
        waiting = model.rounds.waits(identity.worker_id)
        if waiting is not None:
            raise Rejected(
                ErrorCode.ROUND_OPEN,
                f"iteration {waiting.iteration} waits for {len(waiting.members) - len(waiting.fresh)} of "
                f"{len(waiting.members)} workers",
                retry_seconds=model.rounds.retry_seconds(waiting),
            )

    def require_near(self, model: ModelShard, step: int) -> None:
        """Refuse a push so far ahead that newcomers, who begin behind it, would come to the end of all steps.

        Raises:
            Refusal: ``BAD_REQUEST``.
        """
        if isinstance(model, GroupedShard) and step > model.first_step + _MOST_STEP_AHEAD:
            raise Rejected(
                ErrorCode.BAD_REQUEST,
                f"step is {step}; it must be {model.first_step + _MOST_STEP_AHEAD} at most, as the newest iteration is "
                f"that of step {model.first_step - 1}",
            )

    def freeze_due(self, model: ModelShard) -> None:
        """Freeze the rounds that are due; on the writer thread. Raises :class:`Rejected` (``NOT_DURABLE``)."""
        if not isinstance(model, GroupedShard):
            return
        while (frozen := model.rounds.due()) is not None:
            self._metrics.round_contributors.observe(len(frozen.fresh))
            self._do(model, Decision("freeze", frozen.fresh[0], iteration=frozen.iteration))

    def seen_by(
        self, model: ModelShard, member: Member, base_version: int | None, acknowledged: int
    ) -> tuple[ModelShard, int | None]:
        """Return the model from which a worker's pull is answered, and the version that its replica has of that.

        Raises:
            Refusal: ``ROUND_OPEN``.
        """
        if not isinstance(model, GroupedShard):
            return model, base_version
        worker = member.identity.worker_id

        def look() -> ModelShard:
            self.admit(model, member.identity)
            return model.seen_by(worker)

        own = self._writer.run(look)
        born = model.unsynced.get(worker)
        if born is not None:
            if not member.downlink.has_acknowledged(born, acknowledged):
                return own, None
            model.unsynced.pop(worker, None)
        return own, base_version

    def _follow_members(self, model: GroupedShard, caller: Identity) -> None:
        """Let go who is no longer alive, and take the caller in."""
        live = {member.identity.worker_id: member.identity.incarnation for member in self._membership.members()}
        for worker, incarnation in [*model.incarnations.items()]:
            if live.get(worker) != incarnation:
                self._do(model, Decision("leave", worker))
        if caller.worker_id not in model.incarnations:
            self._do(model, Decision("enter", caller.worker_id, caller.incarnation))

    def _do(self, model: GroupedShard, decision: Decision) -> None:
        self._events.decided(decision)
        with self._writer.all_or_stop():
            model.decide(decision)

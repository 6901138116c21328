"""Keeping synchronous rounds: who has contributed, when a round closes, and who waits for that."""

from collections.abc import Callable

from pscore.wire.errors import ErrorCode, Rejected
from psservice.cluster.leases import Membership
from psservice.model.parameters import ModelShard
from psservice.model.rounds import RoundSettings
from psservice.observability.metrics import Metrics
from psservice.recovery.event_log import EventLog
from psservice.shard.apply_thread import Writer


class RoundCoordinator:
    """Closes the rounds of one shard; each shard decides for itself.

    A round may become due by a push, by the death of the one that it waits for, and by the clock; nobody in a call
    waits for that: whoever has contributed asks again.

    Args:
        membership: who is alive.
        events: a close is written down before it is done.
        writer: where it is done.
        metrics: told of it.
        on_close: called on the writer thread after each close.
    """

    def __init__(
        self,
        membership: Membership,
        events: EventLog,
        writer: Writer,
        metrics: Metrics,
        on_close: Callable[[ModelShard], None],
    ) -> None:
        """Nothing is open."""
        self._membership, self._events, self._writer, self._metrics = membership, events, writer, metrics
        self._on_close = on_close

    def is_due(self, model: ModelShard, settings: RoundSettings) -> bool:
        """Tell whether the open round closes."""
        now = model.round
        if now is None or not now.contributors:
            return False
        live = [member.identity.worker_id for member in self._membership.members() if not member.has_no_samples]
        first = model.version == 0
        return settings.is_due(now.contributors, live, now.age_seconds, first=first, away=now.away)

    def close_if_due(self, model: ModelShard, settings: RoundSettings | None) -> None:
        """Close the round where it is due; on the writer thread."""
        if settings is not None and self.is_due(model, settings):
            self.close(model)

    def close(self, model: ModelShard) -> None:
        """Close the round with what is there; on the writer thread. Raises :class:`Rejected` (``NOT_DURABLE``)."""
        if model.round is None or (not model.round.contributors and model.round.is_empty):
            return
        self._metrics.round_contributors.observe(len(model.round.contributors))
        self._events.closed_round(model.version + 1)
        with self._writer.all_or_stop():
            version = model.close_round()
        self._metrics.version.set(version)
        self._on_close(model)

    def look(self, current: Callable[[], ModelShard | None], settings: RoundSettings | None) -> None:
        """Close the round where it is due, from any thread."""
        model = current()
        if model is None or settings is None or not self.is_due(model, settings):
            return

        def close() -> None:
            if current() is model:
                self.close_if_due(model, settings)

        self._writer.run(close)

    def require_closed(self, model: ModelShard, worker: str) -> None:
        """Send a worker away that has contributed to the open round; raises :class:`Rejected` (``ROUND_OPEN``)."""
        open_round = model.round
        if open_round is not None and worker in open_round.contributors:
            raise Rejected(
                ErrorCode.ROUND_OPEN,
                f"the round of version {model.version + 1} has {len(open_round.contributors)} contributions and waits "
                f"for others; live workers: {len(self._membership)}"
                + (", and the first round waits for start_workers of them" if model.version == 0 else ""),
                retry_seconds=open_round.retry_seconds,
            )

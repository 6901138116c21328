"""Going back to a version or a checkpoint.

A run of several shards goes back at all of them or at none: each first writes the older model down and holds, and only
if all have done so, each serves it.
"""

import logging
import secrets

from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.generation import sibling_generation
from psservice.model.parameters import ModelShard
from psservice.shard import model_install
from psservice.shard.shard import Rollback, Shard
from psservice.state.state import ShardState

log = logging.getLogger(__name__)

LONGEST_HOLD_SECONDS = 120.0
"""How long a shard holds between the two steps: whoever has prepared it may be gone."""


def roll_back(shard: Shard, version: int | None, checkpoint: str) -> ModelShard:
    """Go back at once, and return the older model; raises as :func:`prepare`."""
    commit(shard, prepare(shard, version, checkpoint).ticket)
    return shard.require_model(None)


def check(shard: Shard, version: int | None, checkpoint: str, publication: str = "") -> ModelShard:
    """Return the older model to which :func:`prepare` would go back; changes nothing, and raises the same."""
    shard.require_model(None)
    return shard.durability.replay_to(version, checkpoint, publication).model


def prepare(shard: Shard, version: int | None, checkpoint: str, publication: str = "") -> Rollback:
    """Write an older model down, as a new generation, which workers pull by themselves, and hold.

    What is known of the other shards is forgotten: an operator takes all of them back. The records of pushes stay, so
    that the repeat of one that was rolled back is not applied anew. Shards of a feed go back to the ``publication`` of
    shard 0. Raises :class:`Rejected` (``NO_SUCH_CHECKPOINT``,
    ``NOT_DURABLE``, ``BUSY``); nothing has changed then.
    """
    before = shard.require_model(None)
    history = shard.durability.replay_to(version, checkpoint, publication)
    with shard.join_lock:
        model_install.claim(shard)
    past, model = history.state, history.model
    publication = model.publication_at(model.version)  # of its own history

    def make() -> ShardState:
        old = shard.require_model(None)
        # Of the same epoch, for which workers wait at all shards.
        model.generation = sibling_generation(old.generation)
        model.begin_rounds_anew(old.waiting())
        return shard.state.with_model(
            model,
            past.buffers,
            past.datasets,
            run_id=shard.run.run_id,
            run_state=past.run.state,
            samples=past.run.samples,
        )

    prepared = model_install.prepare(shard, make)
    hold_end = shard.environment.monotonic() + LONGEST_HOLD_SECONDS
    shard.rollback = Rollback(
        secrets.token_hex(8),
        prepared,
        model.version,
        model.generation,
        publication,
        checkpoint,
        before.version,
        hold_end,
    )
    return shard.rollback


def commit(shard: Shard, ticket: str) -> Rollback:
    """Serve the older model; raises :class:`Rejected` (``NO_SUCH_CHECKPOINT``, ``NOT_DURABLE``)."""
    rollback = _take(shard, ticket)

    def undo_end() -> None:
        """Shard 0 may tell of the end again until it has gone back too, which gives it another generation."""
        shard.last_push = None
        shard.tell_shards()
        if shard.ends_with is not None:
            shard.undone_end, shard.ends_with = shard.ends_with.generation, None

    model_install.publish(shard, rollback.prepared, undo_end)
    log.warning("rolled back", extra={"from": rollback.before, "to": rollback.version})
    return rollback


def abandon(shard: Shard, ticket: str) -> Rollback:
    """Go on as if nothing had been prepared; raises :class:`Rejected` (``NO_SUCH_CHECKPOINT``)."""
    rollback = _take(shard, ticket)
    model_install.abandon(shard, rollback.prepared)
    return rollback


def end_hold(shard: Shard) -> None:
    """Abandon the prepared rollback once its hold is over; the thread of leases calls this often."""
    rollback = shard.rollback
    if rollback is None or shard.environment.monotonic() < rollback.hold_end:
        return
    try:
        abandon(shard, rollback.ticket)
    except Rejected:  # the next step has come meanwhile
        return
    log.warning("a restore was prepared, and neither committed nor abandoned: the shard goes on as before")


def _take(shard: Shard, ticket: str) -> Rollback:
    with shard.join_lock:
        rollback = shard.rollback
        if rollback is None or rollback.ticket != ticket:
            raise Rejected(
                ErrorCode.NO_SUCH_CHECKPOINT,
                f"nothing is prepared under this ticket any more: a shard holds for {LONGEST_HOLD_SECONDS:.0f} s",
            )
        shard.rollback = None
    return rollback

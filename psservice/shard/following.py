"""The run's id, end, checkpoints, cuts and workers without samples: shard 0 decides, and the other shards follow."""

import logging
from contextlib import suppress

from pscore.reader.cut import Cut
from pscore.wire.errors import Rejected
from pscore.wire.messages import type_from_message, type_to_message
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.cuts.cuts import Wanted
from psservice.feed.relayed_shard import RelayedShard
from psservice.shard import publication
from psservice.shard.lifecycle import close_rounds_after_leave, end_if_over
from psservice.shard.shard import End, Shard
from psservice.state.run import RunState
from psservice.state.v1 import journal_pb2 as rec
from psservice.values import Identity, identity_to_message

log = logging.getLogger(__name__)

RUN_STATES = {state: pb.RunState.Value(f"RUN_STATE_{state.name}") for state in RunState}


def news_of(shard: Shard) -> pb.RunNews:
    """Return the present news for the other shards; on shard 0, from any thread."""
    relayed = None
    if shard.relaying is not None and (target := shard.relaying.target) is not None:
        relayed = target.to_message()
        relayed.age_seconds = 0.0  # or these news would differ from those before
    run, last, cut, model = shard.run, shard.last_push, shard.cuts.wanted, shard.model
    mode = shard.state.mode
    published, name = shard.published if mode.is_feed or mode.is_relayed else (0, "")
    return pb.RunNews(
        run_id=run.run_id,
        run_state=RUN_STATES[run.state],
        last_worker=identity_to_message(last[0]) if last else None,
        last_step=last[1] if last else 0,
        checkpoint=shard.durability.announced_checkpoint(),
        generation=0 if model is None else model.generation,
        cut=cut.number,
        reader_types=[type_to_message(dtype) for dtype in cut.types],
        published=published,
        publication=name,
        relayed=relayed,
        workers_without_samples=[
            member.identity.worker_id for member in shard.leases.members() if member.has_no_samples
        ],
    )


def follow(shard: Shard, news: pb.RunNews) -> None:
    """Do as shard 0 has told; on another shard, in the thread that asks shard 0.

    Raises :class:`~pscore.wire.errors.Rejected` if that cannot be done now: the next news bring it again.
    """
    if shard.relaying is not None:
        if news.HasField("relayed"):
            shard.relaying.aim(Cut.from_message(news.relayed))
    elif not shard.run.run_id:
        named = rec.RunNamed(run_id=news.run_id)
        shard.apply_thread.run(lambda: shard.commit(named))  # not while the model is replaced, with the run's id
        log.info("shard 0 has named the run", extra={"run": news.run_id})
    if news.run_id != shard.run.run_id:
        if shard.relaying is not None:  # one of the two has not fetched anything of this run yet
            return
        log.error(
            "shard 0 is of another run: it has lost its data, or --coordinator names another server",
            extra={"run": shard.run.run_id, "of_shard_0": news.run_id},
        )
        return
    if shard.relaying is not None:
        publication.hear_relayed(shard, news.publication)
    elif news.published:
        with suppress(Rejected):  # no model, or not durable: the next news bring it again
            publication.hear(shard, news.published, news.publication)
    with suppress(Rejected):  # no model, or another one is on its way in: shard 0 names another cut
        shard.cuts.take_part(Wanted(news.cut, tuple(map(type_from_message, news.reader_types))))
    shard.durability.hear_of_checkpoint(news.checkpoint)
    without = {*news.workers_without_samples}
    for member in shard.leases.members():
        member.has_no_samples = member.identity.worker_id in without
    shard.leases.waiters.wake()
    close_rounds_after_leave(shard)
    worker = Identity(news.last_worker.worker_id, news.last_worker.incarnation)
    with shard.join_lock:  # under which a restore undoes an end
        is_over = news.run_state == pb.RUN_STATE_FINISHED and news.generation != shard.undone_end
        if isinstance(shard.model, RelayedShard):  # whose shard 0 may have another cut
            is_over &= shard.model.publication == news.publication
        shard.ends_with = End(worker, news.last_step, news.generation) if is_over else None
    if is_over and shard.model is not None:
        shard.apply_thread.run(lambda: end_if_over(shard))

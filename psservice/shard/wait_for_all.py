"""Workers that are through wait for the others (docs/reference/protocol.md, *Waiting for all*)."""

from psservice.shard.lifecycle import close_rounds_after_leave
from psservice.shard.shard import Shard
from psservice.state.records import worker_of
from psservice.state.run import RunState
from psservice.state.v1 import journal_pb2 as rec
from psservice.values import Identity


def wait_for_all(shard: Shard, identity: Identity, number: int) -> list[str]:
    """Note that a worker is through, and return for whom it has to wait; nobody waits in a run that is over."""
    shard.leases.require(identity)
    worker = shard.state.workers.find(identity)
    # Shards but the first are asked after the wait is over there, and wait once more for those that are late here.
    if worker is not None and (number > worker.last_wait or not shard.is_coordinator):
        shard.change(rec.Waited(worker=worker_of(identity), number=number))
        shard.leases.waiters.wake()
    close_rounds_after_leave(shard)
    is_finished = shard.run.state is RunState.FINISHED
    return [] if is_finished else shard.state.workers.waited_for(identity, number)


def is_over(shard: Shard, identity: Identity, number: int) -> bool:
    """Tell whether a wait is over, or its worker is gone."""
    return shard.run.state is RunState.FINISHED or not shard.state.workers.waited_for(identity, number)

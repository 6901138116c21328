"""Workers that are through wait for the others (docs/reference/protocol.md, *Waiting for all*)."""

from psservice.cluster.run import RunState
from psservice.shard.lifecycle import close_rounds_after_leave
from psservice.shard.shard import Shard
from psservice.types import Identity


def wait_for_all(shard: Shard, identity: Identity, number: int) -> list[str]:
    """Note that a worker is through, and return for whom it has to wait; nobody waits in a run that is over."""
    waited_for = shard.leases.wait_for_all(identity, number, again=not shard.is_coordinator)
    close_rounds_after_leave(shard)
    return [] if shard.run.state is RunState.FINISHED else waited_for


def is_over(shard: Shard, identity: Identity, number: int) -> bool:
    """Tell whether a wait is over, or its worker is gone."""
    return shard.run.state is RunState.FINISHED or not shard.leases.waited_for(identity, number)

"""Putting another model in a shard's place: an upload, a model that the server was started with, or an older one.

The first snapshot of a model is on the disk before anybody is told of the model, and writing it takes as long as the
disk does. So nothing waits for it: the place is claimed under the join lock, the writer thread copies and then refuses
what comes (``BUSY``), the snapshot is written by the caller's thread, and the model is published in one step. Who joins
meanwhile is told to wait. A server that dies before the snapshot has its name begins from what was there; one that dies
after it begins from the new model.
"""

from collections.abc import Callable

from pscore.wire.errors import ErrorCode, Rejected
from psservice.recovery.capture import Content
from psservice.shard.apply_thread import BUSY_RETRY_SECONDS
from psservice.shard.state import ShardState


def claim(state: ShardState) -> None:
    """Claim the place; ``state.join_lock`` is held. :func:`install` comes next, and frees it.

    Raises:
        Refusal: ``BUSY``, where another model is being installed.
    """
    if state.installing:
        raise Rejected(ErrorCode.BUSY, "another model is being installed", retry_seconds=BUSY_RETRY_SECONDS)
    state.installing = True


def install(state: ShardState, make: Callable[[], Content], published: Callable[[], None] = lambda: None) -> Content:
    """Write what a claimed place is to hold, and publish it.

    Args:
        state: the shard.
        make: returns that, on the writer thread, behind everything that was queued.
        published: called under the join lock when the model is there.

    Raises:
        Refusal: ``NOT_DURABLE``, or what ``make`` raises; the shard goes on as before.
    """

    def publish(content: Content) -> None:
        with state.join_lock:
            state.model, state.buffers, state.datasets = content.model, content.buffers, content.datasets
            run = state.run
            run.run_id, run.state, run.samples = content.run_id, content.run_state, content.samples
            state.membership.reset_downlinks()
            state.metrics.version.set(content.model.version)
            published()

    try:
        return state.persistence.install(state, make, publish)
    finally:
        state.installing = False

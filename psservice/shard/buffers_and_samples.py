"""What workers share beside the parameters: buffers, which are averaged, and samples, which are handed out."""

from dataclasses import replace

from pscore.wire.errors import ErrorCode, Rejected
from psservice.cluster.leases import Identity
from psservice.cluster.run import RunState
from psservice.model.buffers import BufferAverage
from psservice.sampling.dataset import Leased, Wish
from psservice.shard.state import ShardState


def require_buffers(state: ShardState, identity: Identity, generation: int) -> BufferAverage:
    """Return the buffers for an exchange; raises :class:`Rejected` where there are none here."""
    state.membership.require(identity)
    state.require_model(generation)
    if state.buffers is None:
        raise Rejected(ErrorCode.BAD_REQUEST, "this shard keeps no buffers (shard 0 does, unless the policy is none)")
    return state.buffers


def exchange_buffers(
    state: ShardState, identity: Identity, generation: int, step: int, samples: int, data: bytes
) -> bytes:
    """Average a worker's buffers in, once a step and not after the run's end, and return the average."""
    require_buffers(state, identity, generation)
    record = state.membership.record(identity)
    live = len(state.membership)
    with state.persistence.averaging:
        state.writer.require_free()
        buffers = require_buffers(state, identity, generation)  # a rollback may have put others there meanwhile
        if samples and step > record.buffer_step and state.run.state is RunState.TRAINING:
            buffers.check(data)
            state.persistence.events.averaged(identity, step, samples, data, live)
            with state.writer.all_or_stop():
                buffers.contribute(data, samples, live)
                record.buffer_step = step
    state.persistence.events.wait()
    return buffers.packed()


def lease_samples(state: ShardState, identity: Identity, wish: Wish) -> Leased:
    """Hand a worker samples to train; on the writer thread, so that the order with pushes is that of the journal.

    Raises:
        Refusal: ``SETTINGS_MISMATCH`` where the worker has another dataset, ``BAD_REQUEST``, ``NOT_DURABLE``,
            ``DRAINING``.
    """
    state.doorway.require_open()
    if not state.is_coordinator:
        raise Rejected(ErrorCode.BAD_REQUEST, "shard 0 hands out samples; the others know of none")

    def lease() -> Leased:
        member = state.membership.require(identity)
        state.require_model(None)
        live = {member.identity for member in state.membership.members()}
        over = state.run.state is RunState.FINISHED
        leased = state.datasets.lease(identity, replace(wish, samples=0) if over else wish, live)
        if leased.changed:
            state.persistence.events.leased(identity, wish, leased)
            with state.writer.all_or_stop():
                state.datasets.put({wish.dataset: leased.after})
        member.has_no_samples = wish.samples > 0 and not leased.after.held_by(identity)
        return leased

    leased = state.writer.run(lease)
    state.persistence.events.wait()
    return leased

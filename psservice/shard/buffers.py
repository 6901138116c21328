"""Buffers, which the workers of a run average: BatchNorm statistics and the like."""

from pscore.wire.errors import ErrorCode, Rejected
from psservice.model.buffers import BufferAverage
from psservice.shard.shard import Shard
from psservice.state.records import worker_of
from psservice.state.run import RunState
from psservice.state.v1 import journal_pb2 as rec
from psservice.values import Identity


def open_exchange(shard: Shard, identity: Identity, generation: int) -> BufferAverage:
    """Return the buffers for an exchange at its header; raises :class:`Rejected` if there will be none."""
    shard.drain_gate.require_open()
    return _require_buffers(shard, identity, generation)


def _require_buffers(shard: Shard, identity: Identity, generation: int) -> BufferAverage:
    shard.leases.require(identity)
    shard.require_model(generation)
    if shard.state.buffers is None:
        raise Rejected(ErrorCode.BAD_REQUEST, "this shard keeps no buffers (shard 0 does, unless the policy is none)")
    return shard.state.buffers


def exchange_buffers(shard: Shard, identity: Identity, generation: int, step: int, samples: int, data: bytes) -> bytes:
    """Average a worker's buffers in, once a step and not after the run's end, and return the average."""

    def exchange() -> BufferAverage:
        buffers = _require_buffers(shard, identity, generation)  # a rollback may have put others there meanwhile
        known = shard.state.pushes.find(identity)
        if samples and step > known.buffer_step and shard.run.state is RunState.TRAINING:
            live = len(shard.leases)
            shard.commit(
                rec.Averaged(worker=worker_of(identity), step=step, samples=samples, buffers=data, live_workers=live)
            )
        return buffers

    buffers = shard.apply_thread.run(exchange)
    shard.durability.records.wait()
    return buffers.packed()

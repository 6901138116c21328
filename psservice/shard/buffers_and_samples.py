"""What workers share beside the parameters: buffers, which are averaged, and samples, which are leased."""

from dataclasses import replace

from pscore.wire.errors import ErrorCode, Rejected
from psservice.data_leases.dataset import Leased, SampleRequest
from psservice.model.buffers import BufferAverage
from psservice.shard.shard import Shard
from psservice.state.records import places_of, worker_of
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


def lease_samples(shard: Shard, identity: Identity, request: SampleRequest) -> Leased:
    """Lease a worker samples to train; on the apply thread, so that the order with pushes is that of the journal."""
    shard.drain_gate.require_open()
    if not shard.is_coordinator:
        raise Rejected(ErrorCode.BAD_REQUEST, "shard 0 hands out samples; the others know of none")

    def lease() -> Leased:
        member = shard.leases.require(identity)
        shard.require_model(None)
        live = {member.identity for member in shard.leases.members()}
        asked = replace(request, samples=0) if shard.run.is_finished else request
        leased = shard.state.datasets.lease(identity, asked, live)
        if leased.changed:
            shard.commit(
                rec.SamplesLeased(
                    worker=worker_of(identity),
                    dataset=request.dataset,
                    size=request.plan.size,
                    seed=request.plan.seed,
                    shuffle=request.plan.shuffle,
                    epoch=request.epoch,
                    held=places_of(request.held),
                    granted=places_of(leased.granted),
                    gone=map(worker_of, leased.gone),
                )
            )
        had_none = member.has_no_samples
        member.has_no_samples = request.samples > 0 and not leased.after.held_by(identity)
        if member.has_no_samples != had_none:
            shard.tell_shards()
        return leased

    leased = shard.apply_thread.run(lease)
    shard.durability.records.wait()
    return leased

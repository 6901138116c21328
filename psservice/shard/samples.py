"""Samples, which shard 0 leases to the workers of a run."""

from dataclasses import replace

from pscore.wire.errors import ErrorCode, Rejected
from psservice.data_leases.dataset import Leased, SampleRequest
from psservice.shard.shard import Shard
from psservice.state.records import places_of, worker_of
from psservice.state.v1 import journal_pb2 as rec
from psservice.values import Identity


def lease_samples(shard: Shard, identity: Identity, request: SampleRequest) -> Leased:
    """Lease a worker samples to train; on the apply thread, so that the order with pushes is that of the journal."""
    shard.drain_gate.require_open()
    if not shard.is_coordinator:
        raise Rejected(ErrorCode.BAD_REQUEST, "shard 0 hands out samples; the others know of none")

    def lease() -> Leased:
        member = shard.leases.require(identity)
        shard.require_model(None)
        asked = replace(request, samples=0) if shard.run.is_finished else request
        leased = shard.state.datasets.lease(identity, asked, shard.leases.identities())
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

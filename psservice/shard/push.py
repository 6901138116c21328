"""A push, from its header to its answer."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from pscore.model.sparse_slice import SparseSlice, merge
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.cluster.member import Member
from psservice.cluster.run import RunState, added
from psservice.model.update.base import PushContext
from psservice.recovery.replayer import on_device
from psservice.sampling.codec import finished_of
from psservice.sampling.dataset import Share
from psservice.shard.lifecycle import end_if_over
from psservice.shard.shard import Shard
from psservice.storage.journal_format import Body
from psservice.types import Identity, PushAnswer
from psservice.wire.identity import identity_from_message


def check_push(shard: Shard, identity: Identity, step: int) -> Member:
    """Refuse at the header what need not be received: draining, no lease, a new push too far ahead of the others.

    Return the member whose push this is.
    """
    shard.drain_gate.require_open()
    member = shard.leases.require(identity)
    if step > shard.dedup.record(identity).step and shard.run.state is RunState.TRAINING:
        _require_in_step(shard, member)
        if shard.synchronizer is not None:
            shard.synchronizer.require_turn(identity)
    return member


def prepare_push(
    shard: Shard, header: pb.PushHeader, segments: Iterable[SparseSlice], messages: Sequence[bytes] = ()
) -> Callable[[], tuple[PushAnswer, bool]]:
    """Return the job for the apply thread that applies a push once.

    The job returns the answer, and whether this identity had been answered before.

    The segments are disjoint, inside the shard's span, and in any order; ``messages`` go into the journal. The answer
    may be sent after ``durability.events.wait``.
    """
    merged = merge(shard.span, sorted(segments, key=lambda segment: segment.span.start))
    norm, finished = shard.admission.norm(merged), finished_of(header)
    update = on_device(merged, shard.device)
    body = shard.durability.events.push_body(messages)
    return lambda: _apply(shard, header, update, norm, finished, body)


def _apply(
    shard: Shard,
    header: pb.PushHeader,
    update: SparseSlice | None,
    norm: float,
    finished: Mapping[str, Share],
    body: Body | None,
) -> tuple[PushAnswer, bool]:
    """Admit, journal, apply and count a push; on the apply thread."""
    identity, step, samples = identity_from_message(header.identity), header.step, header.samples
    generation, base_version = header.generation, header.base_version
    member, record = shard.leases.require(identity), shard.dedup.record(identity)
    if step == record.step and record.answer is not None:
        return record.answer, True
    if step < record.step:
        raise Rejected(ErrorCode.STEP_OUT_OF_ORDER, f"step {step} comes after step {record.step} was applied")

    shard.run.require_open()
    synchronizer = shard.require_synchronizer(generation)
    model, own = synchronizer.model, record.own
    if base_version > model.version:
        raise Rejected(ErrorCode.VERSION_IN_FUTURE, f"base version {base_version}, the server has {model.version}")
    synchronizer.require_acceptable(identity, step)
    staleness = model.version - base_version - own.since(generation, base_version)
    in_rounds = model.round is not None and samples > 0  # a flush is the last chance of its entries
    shard.admission.require_fresh(staleness, in_rounds=in_rounds)
    _require_in_step(shard, member)
    shard.admission.require_small(norm)
    factor = 1.0
    if shard.scaling.is_on and model.mode.is_asynchronous:
        intervals = [other.interval_seconds for other in shard.leases.members()]
        factor = shard.scaling.factor(staleness, member.interval_seconds, intervals)
    datasets = shard.datasets.finish(identity, finished)
    shard.durability.events.pushed(body, model.version + 1, staleness, factor)

    started = time.perf_counter_ns()
    with shard.apply_thread.all_or_stop():
        context = PushContext.of(header, factor)
        version = model.take(identity.worker_id, update, context, step)  # refused here: by a replay too
        if not shard.run.run_id:
            shard.run.run_id = shard.run.adopted(header.identity.run_id)
        answer = PushAnswer(version, staleness, time.perf_counter_ns() - started, factor)
        if model.round is None:
            own = own.noted(generation, base_version, version)
        shard.dedup.remember_push(identity, step, answer, own)
        shard.datasets.update(datasets)

    member.last_step, member.staleness = step, staleness
    shard.leases.tick(member)
    member.samples = added(member.samples, samples)
    shard.metrics.observe_push(answer, model.version)
    shard.run.samples = added(shard.run.samples, samples)
    synchronizer.close_if_due()
    end_if_over(shard)
    return answer, False


def _require_in_step(shard: Shard, member: Member) -> None:
    if shard.admission.ssp_bound:
        shard.admission.require_in_step(shard.leases.pace(member))

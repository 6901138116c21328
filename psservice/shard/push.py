"""A push, from its header to its answer."""

from collections.abc import Callable, Mapping, Sequence

from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.data_leases.codec import finished_of
from psservice.data_leases.dataset import Share
from psservice.membership.leases import Member
from psservice.model.parameters import on_device
from psservice.shard.lifecycle import end_if_over
from psservice.shard.publication import require_base
from psservice.shard.shard import Shard
from psservice.state.records import places_of, worker_of
from psservice.state.run import RunState, added
from psservice.state.v1 import journal_pb2 as rec
from psservice.storage.journal_format import Body
from psservice.values import Identity, PushAnswer, identity_from_message


def check_push(shard: Shard, identity: Identity, step: int) -> Member:
    """Refuse at the header what need not be received: draining, no lease, a new push too far ahead of the others.

    Return the member whose push this is.
    """
    shard.drain_gate.require_open()
    member = shard.leases.require(identity)
    if step > shard.state.pushes.find(identity).step and shard.run.state is RunState.TRAINING:
        _require_in_step(shard, member)
        if shard.synchronizer is not None:
            shard.synchronizer.require_turn(identity)
    return member


def prepare_push(
    shard: Shard,
    header: pb.PushHeader,
    entries: SparseSlice | None,
    messages: Sequence[bytes] = (),
    may_wait: Callable[[], bool] = lambda: True,
) -> Callable[[], tuple[PushAnswer, bool]]:
    """Return the job for the apply thread that applies a push once.

    The job returns the answer, and whether this identity had been answered before.

    ``entries`` are over the shard's span, ``None`` if there are none; ``messages`` go into the journal. ``may_wait``
    tells whether the call may still wait for shard 0. The answer may be sent after ``durability.records.wait``.
    """
    finished = finished_of(header) if header.finished else {}
    update, body = on_device(entries, shard.device), shard.durability.records.body(messages)
    return lambda: _push(shard, header, update, finished, body, may_wait)


def _push(
    shard: Shard,
    header: pb.PushHeader,
    update: SparseSlice | None,
    finished: Mapping[str, Share],
    messages: Body,
    may_wait: Callable[[], bool],
) -> tuple[PushAnswer, bool]:
    """Decide, commit and count a push; on the apply thread."""
    identity = identity_from_message(header.identity)
    member, first_answer = shard.leases.require(identity), shard.state.pushes.answered(identity, header.step)
    if first_answer is not None:
        return first_answer, True
    if shard.state.mode.is_feed:
        require_base(shard, header, update, may_wait=may_wait())
    record = _decide(shard, member, header, finished)
    answer = shard.commit(record, update, messages)
    assert answer is not None
    if finished:
        shard.leases.waiters.wake()
    member.last_step, member.staleness = header.step, answer.staleness
    member.samples = added(member.samples, header.samples)
    if header.HasField("loss"):
        member.loss = header.loss
        shard.progress.note_loss(header.loss)
    had_none = member.has_no_samples
    shard.leases.pushed(member)
    if had_none:
        shard.tell_shards()
    shard.metrics.observe_push(answer, shard.require_model(None).version)
    if shard.synchronizer is not None:
        shard.synchronizer.pushed(identity.worker_id)
    if shard.run.has_end or shard.ends_with is not None:
        end_if_over(shard, (identity, header.step))
    return answer, False


def _decide(shard: Shard, member: Member, header: pb.PushHeader, finished: Mapping[str, Share]) -> rec.Pushed:
    """Admit a new push, and return its record; raises :class:`Rejected`. Nothing is changed but WAGMA's members."""
    identity, state = member.identity, shard.state
    shard.run.require_open()
    model = shard.require_model(header.generation)
    is_feed = model.mode.is_feed  # which has asked for its base before
    if header.base_version > model.version and not is_feed:
        raise Rejected(
            ErrorCode.VERSION_IN_FUTURE, f"base version {header.base_version}, the server has {model.version}"
        )
    if shard.synchronizer is not None:
        shard.synchronizer.require_acceptable(identity, header.step)
    own = state.pushes.find(identity).own.since(header.generation, header.base_version)
    staleness = 0 if is_feed else model.version - header.base_version - own
    rounds = model.mode.rounds
    # A flush has no samples, and is the last chance of its entries.
    shard.admission.require_fresh(
        staleness, in_rounds=rounds is not None and not rounds.wait_factor and header.samples > 0
    )
    _require_in_step(shard, member)
    if finished:  # in a run that leases samples; refused here if they cannot be finished
        state.datasets.finish(identity, finished)
    return rec.Pushed(
        worker=worker_of(identity),
        step=header.step,
        generation=header.generation,
        base_version=header.base_version,
        samples=header.samples,
        learning_rate=header.learning_rate,
        group_rates=header.group_rates,
        finished=[rec.DatasetPlaces(dataset=name, places=places_of(share)) for name, share in finished.items()],
        version=model.version_after(header.base_version),
        staleness=staleness,
    )


def _require_in_step(shard: Shard, member: Member) -> None:
    if shard.admission.ssp_bound:
        shard.admission.require_in_step(lambda: shard.leases.pace(member))

"""How a worker joins a shard and how its lease ends before its time (docs/reference/protocol.md, *Joining*)."""

import logging
from collections.abc import Iterable

from pscore.model.layout import ModelLayout
from pscore.wire.codecs.names import PLAIN_INDEX_CODECS
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.generation import epoch
from pscore.wire.layouts import first_difference, most_memory, pack_layout, unpack_layout, unpacked
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.membership.leases import Member
from psservice.model.training_mode import TrainingMode
from psservice.shard import model_install
from psservice.shard.lifecycle import close_rounds_after_leave, end_left_workers, note_histories
from psservice.shard.shard import Shard
from psservice.state.records import worker_of
from psservice.state.v1 import journal_pb2 as rec
from psservice.values import Identity

log = logging.getLogger(__name__)


def join(shard: Shard, identity: Identity, layout: ModelLayout, request: pb.JoinRequest) -> pb.JoinResponse:
    """Grant a lease, after :class:`JoinLayouts`; the answer tells whether the worker pulls, uploads or waits."""
    method_settings = dict(request.method_settings)
    num_shards = shard.settings.num_shards
    if not all(span.length for span in layout.shard_spans(num_shards)):
        raise Rejected(ErrorCode.BAD_REQUEST, f"a model of {layout.size} elements cannot be cut into {num_shards}")
    with model_install.join_lock_with_initial(shard, layout) as fitted:
        shard.drain_gate.require_open()
        starts = fitted is not None
        alone = not starts and shard.is_alone(identity)
        if shard.settings.relay_of:
            why = f"this server relays {shard.settings.relay_of}, and has no workers: join there"
            raise Rejected(ErrorCode.BAD_REQUEST, why)
        is_new = alone or starts or not shard.run.method
        mode = TrainingMode.of(method_settings) if is_new else shard.state.mode  # refuses what cannot be read
        if is_new and mode.is_relayed:
            raise Rejected(ErrorCode.BAD_REQUEST, "the update rule of a relay is no worker's")
        if is_new and mode.is_feed != bool(layout.word_bytes):
            raise Rejected(ErrorCode.BAD_REQUEST, "a model in words is assigned, and no other: name the update assign")
        if shard.state.layout is not None and not alone and shard.state.layout.fingerprint != layout.fingerprint:
            both = unpacked(shard.packed(shard.state.layout)), unpacked(pack_layout(layout))
            raise _refusal(first_difference(*both) or ("", "the layouts differ"))
        if not is_new:
            shard.run.require_method(request.method, method_settings)
        if shard.is_coordinator and (shard.model is None or request.has_replica):
            shard.uploads.require_seen(request.generation_seen, shard.model.generation if shard.model else 0)
        if starts:
            model_install.require_unclaimed(shard)
        # From here on only the journal can refuse, and then the lease is not granted.
        is_first = _grant_lease(shard, identity, request)
        before = shard.run.method, shard.run.method_settings, shard.state.mode, shard.state.layout
        if is_new:
            shard.run.agree(request.method, method_settings)
            shard.state.mode = mode
        if alone or starts or shard.state.layout is None:
            shard.state.layout = layout
        if fitted is None:
            return _answer(shard, identity, request)
        model_install.claim(shard)
        shard.uploads.initial = None
    try:
        model_install.install_initial(shard, fitted)
    except BaseException:
        with shard.join_lock:
            if is_first:
                shard.leases.leave(identity)
                end_left_workers(shard)
            if not len(shard.leases):  # else others have joined under what was agreed
                shard.run.agree(*before[:2])
                shard.state.mode, shard.state.layout = before[2:]
        raise
    with shard.join_lock:
        return _answer(shard, identity, request)


def _grant_lease(shard: Shard, identity: Identity, request: pb.JoinRequest) -> bool:
    """Grant or renew a lease, and return whether it is a new one; refused, all is as before."""
    if shard.leases.require_free(identity) is not None:
        return False
    end_left_workers(shard)
    index_codecs = sorted(frozenset(request.index_codecs or PLAIN_INDEX_CODECS))
    shard.change(rec.Joined(worker=worker_of(identity), index_codecs=index_codecs))
    worker = shard.state.workers.find(identity)
    assert worker is not None
    shard.leases.grant(worker, request.release)
    shard.metrics.joins.inc()
    extra = {"worker": identity.worker_id, "incarnation": identity.incarnation, "release": request.release}
    log.info("worker joined", extra=extra)
    return True


def _answer(shard: Shard, identity: Identity, request: pb.JoinRequest) -> pb.JoinResponse:
    """Return what a worker that has joined does next; the join lock is held."""
    generation_seen, has_replica = request.generation_seen, request.has_replica
    loaded = request.loaded if request.HasField("loaded") else None
    incarnation, step = shard.state.pushes.last(identity.worker_id) or ("", 0)
    answer = pb.JoinResponse(state=pb.JOIN_STATE_WAIT, first_step=1, last_step=step, last_incarnation=incarnation)
    if shard.installing:
        return answer
    model = shard.model
    replaces = loaded is not None and shard.is_coordinator and model_install.replaces(shard, loaded)
    if model is not None and shard.is_coordinator and has_replica:
        # Another shard has a part of an upload that did not reach this one: a replica of that model mends that.
        replaces |= epoch(generation_seen) > epoch(model.generation)
    if model is not None and not replaces:
        answer.state, answer.generation, answer.version = pb.JOIN_STATE_READY, model.generation, model.version
        answer.first_step = model.first_step
        answer.load_refused = loaded is not None and not model_install.began_as(shard, loaded)
        return answer
    if model is not None:
        generation_seen = max(generation_seen, model.generation)
    granted = shard.uploads.grant(identity, generation_seen, has_replica) if shard.is_coordinator else None
    if granted is not None:
        answer.state, answer.generation = pb.JOIN_STATE_UPLOAD, granted
    return answer


def hear_of_shards(shard: Shard, told: Iterable[pb.ShardHistory]) -> None:
    """Note what a worker has pulled of the other shards; warn of one that has lost versions.

    The publisher of a feed has pulled nothing: it tells what shard 0 has published, and other shards hear of it later.
    """
    settings, model = shard.settings, shard.model
    if shard.state.mode.is_feed:
        return
    for history in told:
        index = history.shard_index
        if model is None or index >= settings.num_shards:
            continue
        if index == settings.shard_index:
            lost = shard.state.histories.hear_of_itself(history, model.generation, model.version)
            what = "this shard's disk was taken back: workers have seen versions that it does not have. Begin"
        else:
            lost = shard.state.histories.hear(history)
            what = "another shard was taken back: it has lost versions that this one has seen. Begin"
        if lost:
            extra = {"of_shard": index, "versions": lost}
            log.warning(f"{what} a new history at a checkpoint of all shards, with psservice restore", extra=extra)


def hear_of_successor(shard: Shard, history: pb.ShardHistory) -> None:
    """Note that a standby serves in this shard's place, and write that down, if its history goes on from this one."""
    if shard.model is None or history.shard_index != shard.settings.shard_index:
        return
    was_replaced = shard.replaced_by
    shard.state.histories.hear_of_successor(history)
    note_histories(shard)
    if shard.replaced_by and not was_replaced:
        log.error(
            "a standby serves in this server's place: nothing is served here any more; stop this server",
            extra={"generation": shard.replaced_by},
        )
        shard.leases.waiters.wake(everyone=True)


def leave(shard: Shard, identity: Identity) -> None:
    """End a lease; unknown ones are ignored, so that leaving twice is harmless."""
    with shard.join_lock:
        left = shard.leases.leave(identity)
        end_left_workers(shard)
    model_install.forget_upload(shard, identity)
    if left:
        close_rounds_after_leave(shard)
        shard.metrics.leaves.inc()
        log.info("worker left", extra={"worker": identity.worker_id})


def evict(shard: Shard, worker_id: str, ban_seconds: float) -> Member | None:
    """End a lease from outside, ban the worker, and return the member that had the lease (``NO_SUCH_WORKER``)."""
    with shard.join_lock:  # else the journal might have the worker's next lease before the end of this one
        member = shard.leases.evict(worker_id, ban_seconds)
        end_left_workers(shard)
    if member is not None:
        model_install.forget_upload(shard, member.identity)
    close_rounds_after_leave(shard)
    log.warning("worker evicted", extra={"worker": worker_id, "ban_seconds": ban_seconds})
    return member


def _refusal(difference: tuple[str, str]) -> Rejected:
    name, how = difference
    return Rejected(ErrorCode.FINGERPRINT_MISMATCH, how, tensor=name)


class JoinLayouts:
    """Compares the layouts of joining workers with the run's before anything is made of them; from any thread.

    A layout may have a million tensors: a join to a run that has the same costs the comparison of two fingerprints.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def read(self, identity: Identity, packed: pb.PackedLayout) -> ModelLayout:
        """Return the run's layout if a worker brings the same, or the worker's if that may become the run's.

        Raises :class:`Rejected` (``FINGERPRINT_MISMATCH``, with the first tensor that differs; ``BAD_REQUEST``;
        ``BUSY`` if there is no memory to unpack it).
        """
        shard, ours = self._shard, self._shard.state.layout
        is_new = ours is None or shard.is_alone(identity)
        if ours is not None and not is_new and packed.fingerprint == ours.fingerprint:
            return ours
        with shard.memory.receive() as reservation:
            reservation.add(most_memory(packed))
            if ours is None or is_new:
                return unpack_layout(packed)
            difference = first_difference(unpacked(shard.packed(ours)), unpacked(packed))
        if difference is None:
            raise Rejected(ErrorCode.BAD_REQUEST, "the layout does not have the fingerprint that it states")
        raise _refusal(difference)

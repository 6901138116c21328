"""Shards without a network: joining, uploading and pushing in a line each."""

from contextlib import contextmanager

import pytest
import torch

from pscore.model.buffers import pack
from pscore.model.sparse_slice import SparseSlice, merge
from pscore.wire import frames
from pscore.wire.errors import Rejected
from pscore.wire.messages import share_to_messages
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.observability.metrics import Metrics
from psservice.replies.reply_session import PullRequest
from psservice.settings import ServerSettings
from psservice.shard import join as joining
from psservice.shard import pull as pulling
from psservice.shard.lifecycle import open_shard
from psservice.shard.model_install import finish_upload, open_upload
from psservice.shard.push import prepare_push
from psservice.state.records import worker_of
from psservice.state.v1 import journal_pb2 as rec
from psservice.values import Identity

HOUR = 3600.0
ANNA, BERT = Identity("anna", "1"), Identity("bert", "1")
READY, UPLOAD, WAIT = pb.JOIN_STATE_READY, pb.JOIN_STATE_UPLOAD, pb.JOIN_STATE_WAIT


@contextmanager
def open_shards(num_shards=1, **settings):
    """All shards of a run; leases end only where a test moves the clock."""
    made = [
        open_shard(
            ServerSettings(lease_seconds=HOUR, shard_index=index, num_shards=num_shards, **settings),
            torch.device("cpu"),
            Metrics(),
        )
        for index in range(num_shards)
    ]
    try:
        yield made
    finally:
        for shard in made:
            shard.close()


@contextmanager
def serving(layout, values, buffers=(), **settings):
    """One shard that has its model, with Anna joined."""
    with open_shards(**settings) as (shard,):
        upload(shard, values, ANNA, join(shard, layout, ANNA).generation, buffers=buffers)
        yield shard


@contextmanager
def serving_shards(num_shards, layout, values, buffers=(), **settings):
    """All shards of a run, each with its part of the model and Anna joined."""
    with open_shards(num_shards, **settings) as shards:
        for shard in shards:
            generation = join(shard, layout, ANNA).generation or full(1)
            upload(shard, values, ANNA, generation, buffers=buffers if shard.is_coordinator else ())
        yield shards


def full(epoch, nonce=1):
    """A generation of this epoch."""
    return epoch << 32 | nonce


def join(shard, layout, who=ANNA, method="dgs", method_settings=None, *, seen=0, has_replica=False, loaded=None):
    request = pb.JoinRequest(
        method=method, method_settings=method_settings, generation_seen=seen, has_replica=has_replica, loaded=loaded
    )
    return joining.join(shard, who, layout, request)


def lease(shard, who=ANNA):
    """Give a worker a lease, and nothing else."""
    shard.change(rec.Joined(worker=worker_of(who)))
    return shard.leases.grant(shard.state.workers.find(who))


def last_push(joined):
    """Incarnation and step of the last push under the name of a worker that has joined."""
    return joined.last_incarnation, joined.last_step


def upload(shard, values, who, generation, *, version=0, buffers=(), digest=b""):
    """Send a shard its range of the whole model's values."""
    part = values[shard.span.start : shard.span.end].clone()
    packed, checksum = pack(buffers), frames.Checksum()
    brought = open_upload(shard, who, generation, len(packed))
    call = brought.go_on()
    for chunk, _ in frames.encode(SparseSlice(shard.span, None, part), chunk_bytes=1 << 20):
        checksum.add(chunk)
        brought.read(call, chunk)
    for piece in frames.encode_bytes(packed, 1 << 20):
        brought.read_buffers(call, piece)
    brought.verify(call, checksum.commit())
    return finish_upload(shard, brought, version, digest=digest)


def present(shard):
    """The generation that a shard holds."""
    return shard.model.generation if shard.model else full(1)


def push(shard, step, entries=(), who=ANNA, *, generation=None, base=0, samples=1):
    """Push {index: value} entries, or ready segments."""
    generation = present(shard) if generation is None else generation
    if isinstance(entries, dict):
        chosen = sorted(i for i in entries if shard.span.start <= i < shard.span.end)
        offsets = torch.tensor([i - shard.span.start for i in chosen], dtype=torch.int64)
        values = torch.tensor([entries[i] for i in chosen], dtype=torch.float32)
        entries = [SparseSlice(shard.span, offsets, values)] if chosen else []
    whole = merge(shard.span, sorted(entries, key=lambda segment: segment.span.start))
    header, entries = push_of(who, step, generation, base, samples, [] if whole is None else [whole])
    answer = shard.apply_thread.run(prepare_push(shard, header, entries))
    shard.durability.records.wait()
    return answer


def push_of(who, step, generation, base, samples, segments, learning_rate=0.0, finished=None):
    """Header and entries of a push, in a list or none; ``finished`` has samples by dataset."""
    header = pb.PushHeader(
        identity=pb.WorkerIdentity(worker_id=who.worker_id, incarnation=who.incarnation),
        step=step,
        generation=generation,
        base_version=base,
        samples=samples,
        learning_rate=learning_rate,
    )
    for dataset, share in (finished or {}).items():
        header.finished.add(dataset=dataset, ranges=share_to_messages(share))
    (entries,) = segments or [None]
    return header, entries


def pull(shard, who=ANNA, *, generation=None, base=None, acknowledged=0, image=False):
    generation = present(shard) if generation is None else generation
    reply = pulling.pull(shard, shard.leases.require(who), generation, PullRequest(base, acknowledged, image))
    shard.durability.records.wait()
    return reply


def theta(shard):
    return shard.copy_model().read(shard.span)


def reason_of(call, *arguments, **options):
    """Why a call is refused; it must be."""
    with pytest.raises(Rejected) as refused:
        call(*arguments, **options)
    return refused.value.reason


class Clock:
    """A clock that a test moves; give it to ``shard.leases``."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def with_clock(shard):
    clock = Clock()
    shard.leases.clock = clock
    for member in shard.leases._members.values():
        member.lease_end = clock.now + HOUR
    return clock

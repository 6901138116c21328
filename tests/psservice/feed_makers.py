"""Feeds without a network: shards of one, a publication, and its words."""

from contextlib import contextmanager

import torch

from pscore.model.layout import ModelLayout, TensorSpec
from pscore.model.sparse_slice import SparseSlice
from pscore.wire import frames
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.model.training_mode import TrainingMode
from psservice.settings import ShardSettings
from psservice.shard.publication import publish
from psservice.shard.push import prepare_push
from tests.psservice.shard_makers import ANNA, full, join, open_shards, present, push_of, upload

ASSIGN = {"update": "assign"}
FEED = ModelLayout(
    (
        TensorSpec("half", (40,), torch.bfloat16),
        TensorSpec("wide", (10,), torch.int64),
        TensorSpec("scale", (), torch.float32),
    ),
    word_bytes=2,
)


def words(seed=0, layout=FEED):
    """Words of any bits, ``[layout.size]``."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = layout.size * layout.word_bytes
    return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8).view(layout.value_dtype)


def feed_of(kind, values, **settings):
    """A shard's model of a feed, of a kind, with all of the words."""
    span = FEED.shard_spans(1)[0]
    return kind(
        FEED,
        span,
        values.clone(),
        generation=1,
        version=0,
        settings=ShardSettings(**settings),
        mode=TrainingMode.of(ASSIGN),
    )


def changes(span, entries):
    """Words ``{place in the span: word}`` of a publication; ``None`` if there are none."""
    if not entries:
        return None
    places = torch.tensor(sorted(entries), dtype=torch.int64)
    return SparseSlice(span, places, torch.tensor([entries[place] for place in sorted(entries)], dtype=torch.int16))


def whole(span, values):
    """All words of a span as a publication."""
    return SparseSlice(span, None, values[span.start : span.end].clone())


@contextmanager
def feeding(num_shards=1, values=None, **settings):
    """All shards of a feed, each with its part of version 0, and Anna as its publisher."""
    with open_shards(num_shards, run_id="feed", **settings) as shards:
        for shard in shards:
            generation = join(shard, FEED, ANNA, "feed", ASSIGN).generation or full(1)
            upload(shard, words() if values is None else values, ANNA, generation)
        yield shards


def stage(shard, step, update, base, who=ANNA, *, may_wait=True):
    """Push a publication; return the answer."""
    header, update = push_of(who, step, present(shard), base, 0, [update])
    header.plan.add(start=shard.span.start, length=shard.span.length)
    messages = _messages(header, update)
    answer, _ = shard.apply_thread.run(prepare_push(shard, header, update, messages, lambda: may_wait))
    shard.durability.records.wait()
    return answer


def _messages(header, update):
    """Write a publication as its stream has it, for the journal."""
    checksum, parts = frames.Checksum(), [pb.PushSparseRequest(header=header)]
    for chunk, _ in frames.encode(update, chunk_bytes=1 << 20) if update is not None else ():
        checksum.add(chunk)
        parts.append(pb.PushSparseRequest(chunks=[chunk]))
    parts.append(pb.PushSparseRequest(commit=checksum.commit()))
    return [part.SerializeToString() for part in parts]


def publish_at(shard, version, who=ANNA):
    """Publish a version on shard 0."""
    return publish(shard, who, present(shard), version)

"""A shard and a worker's replica without a network between them; every reply passes through real frames."""

from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from psclient.model.replica import Replica
from pscore.model.layout import ModelLayout, Span, TensorSpec
from pscore.model.sparse_slice import SparseSlice
from pscore.selection import SELECTORS
from pscore.wire import frames
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.apply_thread import ApplyThread
from psservice.model.parameters import ModelShard
from psservice.model.training_mode import TrainingMode
from psservice.replies.reply_session import PullRequest, ReplyMaker, ReplyMode, ReplySession
from psservice.replies.topk import TopKSettings
from psservice.settings import ShardSettings

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def layout_of(*tensors, buffers=()):
    """A layout of (length or shape, dtype) pairs."""
    specs = [
        TensorSpec(f"t{i}", (shape,) if isinstance(shape, int) else shape, dtype)
        for i, (shape, dtype) in enumerate(tensors)
    ]
    return ModelLayout(tuple(specs), tuple(buffers))


def shard_of(layout, values, *, num_shards=1, index=0, ledger_multiple=100.0, version=0):
    span = layout.shard_spans(num_shards)[index]
    return ModelShard(
        layout,
        span,
        values[span.start : span.end].clone(),
        generation=1,
        version=version,
        settings=ShardSettings(ledger_multiple=ledger_multiple),
        mode=TrainingMode(),
    )


@contextmanager
def writing():
    """A writer thread that ends with the block."""
    writer = ApplyThread()
    try:
        yield writer
    finally:
        writer.close()


def topk(density=0.1, dense_below=0, value=pb.VALUE_CODEC_FP32):
    return TopKSettings(density, dense_below, SELECTORS["exact"], value, 64)


def sparse_push(span, density, seed):
    """Random entries of a span, on a coarse grid so that half precision moves too; ``None`` if none was drawn."""
    generator = torch.Generator().manual_seed(seed)
    offsets = (torch.rand(span.length, generator=generator) < density).nonzero().view(-1)
    if not offsets.numel():
        return None
    return SparseSlice(span, offsets, torch.randn(offsets.numel(), generator=generator))


def cloned(state):
    """Copy an exported state, whose tensors go on to change."""
    return replace(state, tensors={name: tensor.clone() for name, tensor in state.tensors.items()})


def bits(tensor):
    """The tensor's bytes, so that signed zeros and NaNs compare as what they are."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def chunks_of(reply):
    """The chunks of a reply, which its commit and what confirms parts of it must agree with."""
    checksum, chunks, ended = frames.Checksum(), [], False
    for message in map(pb.PullDiffResponse.FromString, reply.messages):
        assert not ended
        for chunk in message.chunks:
            checksum.add(chunk)
            chunks.append(chunk)
        for kind in ("so_far", "commit"):
            if message.HasField(kind):
                checksum.verify(getattr(message, kind))
        ended = message.HasField("commit")
    assert ended
    return chunks


def segments_of(reply, span, own=None):
    """The entries of a reply, as a worker decodes them, or a reader with values of its own."""
    reader = frames.ChunkReader(span, own=own)
    return [reader.read(chunk) for chunk in chunks_of(reply)]


@dataclass
class Rule:
    """A reply rule that the test sets."""

    topk: bool = False
    seen: list = field(default_factory=list)

    def wants_topk(self, changed_density, in_topk, limit=None, *, pushes_all=False):
        self.seen.append(changed_density)
        return self.topk


@dataclass(frozen=True)
class Wire:
    """A reply as it travels."""

    mode: ReplyMode
    number: int
    version: int
    image: bool
    chunks: tuple[bytes, ...]
    density: float


class Link:
    """One worker's way down from one shard, and its side of the pull protocol."""

    def __init__(self, model, writer, replica, topk_settings=None, rule=None):
        self.model, self.writer, self.replica = model, writer, replica
        self.topk = topk_settings or topk()
        self.rule = rule or Rule()
        self.downlink = ReplySession(self.rule)
        self.base, self.acknowledged, self.image = None, 0, False
        self.reserve = lambda nbytes: None

    def reply(self, acknowledged=None, base_end=0):
        """Pull; return what the server has made."""
        return ReplyMaker(
            self.model,
            self.writer,
            self.downlink,
            self.topk,
            PullRequest(self.base, self.acknowledged if acknowledged is None else acknowledged, self.image, base_end),
            frames.WireForm(),
            self.reserve,
        ).answer()

    def ask(self, acknowledged=None, base_end=0):
        """Pull; the reply is on its way."""
        reply = self.reply(acknowledged, base_end)
        return Wire(
            reply.mode,
            reply.number,
            reply.version,
            reply.image,
            tuple(chunk.SerializeToString(deterministic=True) for chunk in chunks_of(reply)),
            reply.density,
        )

    def receive(self, wire):
        """Apply a reply that has arrived, as docs/reference/protocol.md has it."""
        reader = frames.ChunkReader(self.model.span)
        segments = [reader.read(pb.Chunk.FromString(chunk)) for chunk in wire.chunks]
        if wire.mode is ReplyMode.TOPK:
            assert self.image, "differences for a replica of which the server has no image"
            self.replica.add(segments)
        else:
            self.replica.write(segments)
            if wire.image:
                self.replica.open_fp32(self.model.span)
        self.base, self.acknowledged, self.image = wire.version, wire.number, wire.image

    def pull(self):
        wire = self.ask()
        self.receive(wire)
        return wire

    def entries(self, wire):
        return sum(pb.Chunk.FromString(chunk).count for chunk in wire.chunks)


def new_replica(layout, fill=0.0):
    return Replica(layout, [torch.full(spec.shape, fill, dtype=spec.dtype) for spec in layout.parameters])


def replica_bits(replica, span):
    """What the parameters hold inside a span, in their own dtypes."""
    layout = replica.layout
    return [
        bits(replica.parameters[i].reshape(-1)[common.start - layout.offsets[i] : common.end - layout.offsets[i]])
        for i, common in layout.overlapping(span)
    ]


def server_bits(model):
    """What an exact replica must hold: the master, cast to each parameter's dtype."""
    return [
        bits(model.theta[common.start - model.span.start : common.end - model.span.start].to(spec.dtype))
        for i, common in model.layout.overlapping(model.span)
        for spec in [model.layout.parameters[i]]
    ]


def fp32_bits(replica, span):
    """The fp32 replica inside a span: the parameters, or the fp32 copies kept beside half-precision ones."""
    layout = replica.layout
    found = []
    for i, common in layout.overlapping(span):
        flat = replica._fp32[i] if layout.parameters[i].dtype != F32 else replica.parameters[i].reshape(-1)
        found.append(flat[common.start - layout.offsets[i] : common.end - layout.offsets[i]])
    return bits(torch.cat(found)) if found else b""


def span_of(layout):
    return Span(0, layout.size)

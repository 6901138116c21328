"""What a push and a pull cost the server, measured on its own engine inside this process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from benchmarks.harness.timing import Stopwatch
from benchmarks.sections.wire import Tally
from benchmarks.workload.layouts import noise_push
from benchmarks.workload.shard_server import InProcessShard
from pscore.model.layout import ModelLayout
from pscore.model.sparse_slice import SparseSlice
from pscore.selection import DEFAULT_DENSE_BELOW
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.model.reply_session import Reply

_SETTLING = 2
"""Replies before any is measured: in life the number of pushes that each covers hardly changes, and thresholds fit."""


@dataclass(frozen=True, slots=True)
class PushWork:
    """Seconds to parse, decode and check a push, and to apply it."""

    decode: float
    apply: float


@dataclass(frozen=True, slots=True)
class ReplyWork:
    """Building and writing a reply.

    Attributes:
        density: entries over the model's elements.
        build: seconds.
        encode: seconds.
        entries: in it.
        frame_bytes: of its messages, values left out.
        value_bits: of one value, as it was written.
    """

    density: float
    build: float
    encode: float
    entries: float
    frame_bytes: float
    value_bits: float


@dataclass(frozen=True, slots=True)
class ServerCosts:
    """Medians.

    Attributes:
        sparse: a push at the density.
        dense: a push of everything.
        exact: replies by the number of pushes that they cover.
        topk: replies at the density, by value type and by the number of pushes since the last one.
        whole: the reply that holds every element.
    """

    sparse: PushWork
    dense: PushWork
    exact: dict[int, ReplyWork]
    topk: dict[str, dict[int, ReplyWork]]
    whole: ReplyWork


def measure(
    layout: ModelLayout, density: float, covered: Sequence[int], value_types: Sequence[str], repeats: int, seed: int
) -> ServerCosts:
    """Push and pull, in turn.

    Args:
        layout: the model.
        density: of a push and of a top-k reply.
        covered: the numbers of pushes that replies cover; ascending.
        value_types: of top-k replies.
        repeats: how often.
        seed: of the entries.
    """
    rng = np.random.default_rng(seed)
    exact = InProcessShard(layout, "exact", ledger_multiple=4.0)
    topk = {
        name: InProcessShard(layout, "topk", down_density=density, down_value_type=name, ledger_multiple=4.0)
        for name in value_types
    }
    for shard in topk.values():
        shard.open_image()
    everything = SparseSlice(exact.span, None, torch.full((layout.size,), 1e-3))
    sparse: list[PushWork] = []
    dense: list[PushWork] = []
    replies: dict[object, list[ReplyWork]] = {}
    for count in covered:
        for repeat in range(-_SETTLING, repeats):
            pushes = [noise_push(layout, density, DEFAULT_DENSE_BELOW, rng) for _ in range(count)]
            sparse += [_push(exact, push) for push in pushes]
            exactly = _reply(exact, lambda n=count: exact.pull(exact.model.version - n))
            if repeat >= 0:
                replies.setdefault(count, []).append(exactly)
            for name, shard in topk.items():
                for push in pushes:
                    shard.commit(push)
                selected = _reply(shard, shard.pull_topk)
                if repeat >= 0:
                    replies.setdefault((name, count), []).append(selected)
    for _ in range(repeats):
        dense.append(_push(exact, everything))
        replies.setdefault("whole", []).append(_reply(exact, lambda: exact.pull(exact.model.version - 1)))
    exact.close()
    for shard in topk.values():
        shard.close()
    found = {kind: _median_reply(many) for kind, many in replies.items()}
    return ServerCosts(
        _median_push(sparse),
        _median_push(dense),
        {count: found[count] for count in covered},
        {name: {count: found[name, count] for count in covered} for name in value_types},
        found["whole"],
    )


def _push(shard: InProcessShard, update: SparseSlice) -> PushWork:
    wires = [message.SerializeToString() for message in shard.push_messages(update)]
    watch = Stopwatch()
    with watch.part("decode"):
        header, segments = shard.read([pb.PushSparseRequest.FromString(data) for data in wires])
    with watch.part("apply"):
        shard.apply(header, segments)
    return PushWork(watch.parts["decode"], watch.parts["apply"])


def _reply(shard: InProcessShard, pull: Callable[[], Reply]) -> ReplyWork:
    watch = Stopwatch()
    with watch.part("build"):
        reply = pull()
    with watch.part("encode"):
        list(reply.messages)
    tally = Tally(shard.pull_messages(reply))
    return ReplyWork(
        density=tally.entries / shard.layout.size,
        build=watch.parts["build"],
        encode=watch.parts["encode"],
        entries=tally.entries,
        frame_bytes=tally.bytes - tally.value_bytes,
        value_bits=8 * tally.value_bytes / tally.entries,
    )


def _median_push(many: Sequence[PushWork]) -> PushWork:
    return PushWork(median(work.decode for work in many), median(work.apply for work in many))


def _median_reply(many: Sequence[ReplyWork]) -> ReplyWork:
    fields = ReplyWork.__dataclass_fields__
    return ReplyWork(*(median(getattr(work, name) for work in many) for name in fields))

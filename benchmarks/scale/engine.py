"""The server's own work, measured on its engine in this process: no gRPC, no other process.

Times are CPU times of the process, so that what else the machine does hardly matters.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch

from benchmarks.scale.costs import AMONG_CHANGED, SCAN_FROM
from benchmarks.scale.fits import serial_share
from benchmarks.sections.wire import Tally
from benchmarks.workload.layouts import noise_push, one_tensor
from benchmarks.workload.shard_server import InProcessShard
from pscore.model.layout import ModelLayout
from pscore.model.sparse_slice import SparseSlice
from pscore.selection import DEFAULT_SELECTOR, SELECTORS
from pscore.wire import frames
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.model import union_loops
from psservice.model.changelog import gather, union
from psservice.replies.topk import DifferenceSelection, TopKSettings

Points = dict[str, list[tuple[float, ...]]]
"""(units, seconds) by cost, as :class:`~benchmarks.scale.costs.Costs` names them.

A third number is explained in :func:`benchmarks.scale.fits.line`.
"""

_WINDOWS = (2, 6, 20)
"""Pushes that replies cover; with the densities measured these lie on both sides of where unions are marked."""

_THREAD_SECONDS, _THREAD_ROUNDS = 0.15, 10
_LEAST = 1e-7


@dataclass
class Work:
    """What was found.

    Attributes:
        points: medians.
        index_bits: (density, bits) of replies and pushes.
        push_frame: bytes of a push beside indices and values.
        pull_frame: likewise of a reply.
        serial: by work, (units, share) of what two threads did.
    """

    points: Points = field(default_factory=dict)
    index_bits: list[tuple[float, float]] = field(default_factory=list)
    push_frame: list[float] = field(default_factory=list)
    pull_frame: list[float] = field(default_factory=list)
    serial: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, name: str, units: float, seconds: Sequence[float]) -> None:
        self.points.setdefault(name, []).append((units, median(seconds)))


def measure(
    sizes: Sequence[int], densities: Sequence[float], repeats: int, seed: int, say: Callable[[str], None]
) -> Work:
    """Measure shards of several sizes, with one torch thread as on a server that has many calls."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    work, rng = Work(), np.random.default_rng(seed)
    try:
        for size in sizes:
            layout = one_tensor(size)
            for density in densities:
                say(f"engine: {size:,} elements at {density:.1%}")
                _pushes(work, layout, density, repeats, rng)
                _exact(work, layout, density, repeats, rng)
                _topk(work, layout, density, repeats, rng)
            _dense(work, layout, repeats)
        _threads(work, one_tensor(sizes[-1]), max(densities), rng)
    finally:
        torch.set_num_threads(threads)
    return work


def _pushes(work: Work, layout: ModelLayout, density: float, repeats: int, rng: np.random.Generator) -> None:
    shard = InProcessShard(layout, "exact")
    times: dict[str, list[float]] = {"decode": [], "apply": []}
    for repeat in range(-1, repeats):
        push = noise_push(layout, density, 0, rng)
        read, messages = _push(shard, push)
        started = time.process_time()
        shard.model.apply(push)
        applied = time.process_time() - started
        if repeat >= 0:
            times["decode"].append(max(_LEAST, read - applied))
            times["apply"].append(applied)
    tally = Tally(messages)
    work.index_bits.append((density, 8 * tally.index_bytes / tally.entries))
    work.push_frame.append(tally.bytes - tally.index_bytes - tally.value_bytes)
    shard.close()
    for name, seconds in times.items():
        work.add(name, tally.entries, seconds)


def _push(shard: InProcessShard, push: SparseSlice) -> tuple[float, list[pb.PushSparseRequest]]:
    """Read and apply a push; return the seconds of both, and its messages."""
    messages = shard.push_messages(push)
    wires = [message.SerializeToString() for message in messages]
    started = time.process_time()
    shard.apply(*shard.read([pb.PushSparseRequest.FromString(wire) for wire in wires]))
    return time.process_time() - started, messages


def _exact(work: Work, layout: ModelLayout, density: float, repeats: int, rng: np.random.Generator) -> None:
    shard = InProcessShard(layout, "exact", ledger_multiple=8.0)
    size = layout.size
    scan = median(_scan(size) for _ in range(3))
    for window in _WINDOWS:
        unions, gathers, encodes = [], [], []
        marked = window * density * size >= SCAN_FROM * size
        for repeat in range(-1, max(2, repeats // 3)):
            for _ in range(window):
                shard.commit(noise_push(layout, density, 0, rng))
            supports = shard.model.changelog.since(shard.model.version - window)
            assert supports is not None
            started = time.process_time()
            changed = union(supports, size)
            united = time.process_time()
            reply = shard.pull(shard.model.version - window)
            built = time.process_time()
            list(reply.messages)
            ended = time.process_time()
            if repeat >= 0:
                unions.append(max(_LEAST, united - started - (scan if marked else 0.0)))
                gathers.append(max(_LEAST, built - united - (united - started)))
                encodes.append(ended - built)
        tally = Tally(shard.pull_messages(reply))
        entries = window * density * size
        work.add("union_mark" if marked else "union_sort", entries, unions)
        assert changed is not None
        work.add("gather", changed.numel(), gathers)
        work.add("encode", tally.entries, encodes)
        work.index_bits.append((tally.entries / size, 8 * tally.index_bytes / tally.entries))
        work.pull_frame.append(tally.bytes - tally.index_bytes - tally.value_bytes)
    shard.close()


def _topk(work: Work, layout: ModelLayout, density: float, repeats: int, rng: np.random.Generator) -> None:
    shard = InProcessShard(layout, "topk", down_density=density)
    shard.open_image()
    for window in (1, 8):
        entries = window * density * layout.size
        selects = []
        for repeat in range(-3, repeats):
            for _ in range(window):
                shard.commit(noise_push(layout, density, 0, rng))
            started = time.process_time()
            shard.pull_topk()
            if repeat >= 0:
                selects.append(time.process_time() - started)
        if entries <= AMONG_CHANGED * layout.size:
            work.add("select_changed", entries, selects)
        else:
            work.add("select_all", layout.size, selects)
    shard.close()


def _dense(work: Work, layout: ModelLayout, repeats: int) -> None:
    shard = InProcessShard(layout, "exact")
    everything = SparseSlice(shard.span, None, torch.full((layout.size,), 1e-3))
    copies, encodes = [], []
    for _ in range(max(2, repeats // 2)):
        shard.commit(everything)
        started = time.process_time()
        reply = shard.pull(shard.model.version - 1)
        built = time.process_time()
        list(reply.messages)
        encodes.append(time.process_time() - built)
        copies.append(built - started)
    shard.close()
    work.add("copy", layout.size, copies)
    work.add("encode_dense", layout.size, encodes)
    work.add("union_scan", layout.size, [_scan(layout.size) for _ in range(max(2, repeats // 2))])


def _scan(size: int) -> float:
    """Return the seconds to make a bitmap, count its bits, and scan it where only one is set."""
    started = time.process_time()
    words = np.zeros(-(-size // 64), np.uint64)
    words[-1] = 1
    offsets = np.empty(int(np.bitwise_count(words).sum(dtype=np.int64)), np.int64)
    union_loops.gather(words, None, offsets, None)
    return time.process_time() - started


def _threads(work: Work, layout: ModelLayout, density: float, rng: np.random.Generator) -> None:
    """Let one and two threads do the same works, each on its own, and see how much faster two are."""
    shards = [InProcessShard(layout, "exact", ledger_multiple=8.0) for _ in range(2)]
    push = noise_push(layout, density, 0, rng)
    wires = [[message.SerializeToString() for message in shard.push_messages(push)] for shard in shards]
    for shard in shards:
        for _ in range(4):
            shard.commit(noise_push(layout, density, 0, rng))
    replies = [_entries_after(shard, 4) for shard in shards]

    def decode(which: int) -> None:
        shards[which].read([pb.PushSparseRequest.FromString(wire) for wire in wires[which]])

    def encode(which: int) -> None:
        for chunk, _ in frames.encode(replies[which], chunk_bytes=shards[which].settings.chunk_bytes):
            chunk.SerializeToString()

    def unite(which: int) -> None:
        supports = shards[which].model.changelog.since(shards[which].model.version - 4)
        assert supports is not None
        union(supports, layout.size)

    down = TopKSettings(density, 0, SELECTORS[DEFAULT_SELECTOR])
    images = [torch.zeros(layout.size) for _ in shards]
    selections = [DifferenceSelection(down) for _ in shards]

    def select(which: int) -> None:
        # Nothing has changed since the last time, and nothing exceeds the bound: everything is searched.
        selections[which].select(shards[which].model, images[which])

    entries = density * layout.size
    jobs = {
        "decode": (entries, decode),
        "encode": (replies[0].entries, encode),
        "union": (4 * entries, unite),
        "select": (layout.size, select),
    }
    for name, (units, job) in jobs.items():
        job(0)
        job(1)
        rates = [(_rate(job, 1), _rate(job, 2)) for _ in range(_THREAD_ROUNDS)]
        one, two = max(one for one, _ in rates), max(two for _, two in rates)
        work.serial[name] = units, serial_share(one, two, os.cpu_count() or 1)
    for shard in shards:
        shard.close()


def _entries_after(shard: InProcessShard, window: int) -> SparseSlice:
    """Return the values of what the last pushes have changed."""
    supports = shard.model.changelog.since(shard.model.version - window)
    found = gather(supports or (), shard.model.theta)
    assert found is not None
    return SparseSlice(shard.span, *found)


def _rate(job: Callable[[int], None], threads: int) -> float:
    """Return jobs a second of so many threads together."""
    counts, ready = [0] * threads, threading.Barrier(threads)

    def loop(which: int) -> None:
        ready.wait()
        end = time.monotonic() + _THREAD_SECONDS
        while time.monotonic() < end:
            job(which)
            counts[which] += 1

    running = [threading.Thread(target=loop, args=(which,)) for which in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return sum(counts) / _THREAD_SECONDS

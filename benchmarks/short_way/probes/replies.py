"""What pushes and replies cost a server beside its calls: one shard in this process, CPU time in copies of the model.

It uses the internals of the checkout that it measures, behind the in-process shard of that checkout's benchmarks.
"""

import statistics
import time
from collections.abc import Callable

import common  # beside this file, whose folder is the first that Python looks in
import numpy as np
import torch

try:
    from benchmarks.workload import layouts, streams
    from benchmarks.workload.shard_server import InProcessShard
except ImportError:  # 7cc8f91
    from benchmarks import layouts, streams  # type: ignore[attr-defined, no-redef]
    from benchmarks.shardserver import InProcessShard  # type: ignore[import-not-found, no-redef]

_PUSHES, _DENSE_BELOW = 16, 1024
_VARIED = (1, 16, 4, 16, 1, 4)
_SETTLING = 3


def measure(layout: str, rounds: int) -> dict[str, float]:
    """Measure on one thread of torch, a function of :mod:`benchmarks.workload.layouts` being the model."""
    torch.set_num_threads(1)
    shape = getattr(layouts, layout)()
    found: dict[str, list[float]] = {}
    copy = common.Copy(shape.size)

    def note(name: str, work: Callable[[], None]) -> None:
        copied = min(copy.seconds(time.process_time) for _ in range(3))
        started = time.process_time()
        work()
        found.setdefault(name, []).append((time.process_time() - started) / copied)
        found.setdefault("copy_ms", []).append(1e3 * copied)

    for part in (_exact, _topk, _quantised):
        part(shape, rounds, note)
    return {name: statistics.median(values) for name, values in found.items()}


_Note = Callable[[str, Callable[[], None]], None]


def _exact(shape: "layouts.ModelLayout", rounds: int, note: _Note) -> None:
    """Build and encode an exact reply after 16 pushes of 1 %."""
    shard, pushes = InProcessShard(shape, "exact"), _pushes(shape, 0.01, _PUSHES)
    for number in range(1 + rounds):
        for push in pushes:
            shard.commit(push)
        reply = []
        noted = note if number else _ignore
        noted("exact_build", lambda: reply.append(shard.pull(shard.model.version - _PUSHES)))  # noqa: B023
        noted("exact_encode", lambda: _write(shard, reply[0]))  # noqa: B023
    shard.close()


def _topk(shape: "layouts.ModelLayout", rounds: int, note: _Note) -> None:
    """Select a top-k reply after 16 pushes of 1 %, always and with other numbers of pushes between."""
    shard, pushes = InProcessShard(shape, "topk", down_density=0.01), _pushes(shape, 0.01, _PUSHES)
    shard.open_image()
    for name, counts in (("topk_16", (_PUSHES,) * rounds), ("topk_varied", _VARIED[: 2 * rounds])):
        for number, count in enumerate((*((_PUSHES,) * _SETTLING), *counts)):
            for push in pushes[:count]:
                shard.commit(push)
            (note if number >= _SETTLING else _ignore)(name, shard.pull_topk)
    shard.close()


def _quantised(shape: "layouts.ModelLayout", rounds: int, note: _Note) -> None:
    """Decode and apply a push of 9 % in 4 bits; select and encode a top-k reply of the same kind."""
    shard = InProcessShard(shape, "topk", down_density=0.09, down_value_type="int4")
    shard.open_image()
    pushes = _pushes(shape, 0.09, 2)
    streams.CODEC_OF_DTYPE = {torch.float32: streams.pb.VALUE_CODEC_INT4}
    for number in range(_SETTLING + rounds):
        messages = shard.push_messages(pushes[number % 2])
        noted = note if number >= _SETTLING else _ignore
        noted("int4_apply", lambda: shard.apply(*shard.read(messages)) and None)  # noqa: B023
        noted("int4_topk", lambda: _write(shard, shard.pull_topk()))
    shard.close()


def _pushes(shape: "layouts.ModelLayout", density: float, count: int) -> "list[layouts.SparseSlice]":
    rng = np.random.default_rng(0)
    return [layouts.noise_push(shape, density, _DENSE_BELOW, rng) for _ in range(count)]


def _write(shard: InProcessShard, reply: object) -> None:
    written = getattr(reply, "messages", None)  # serialised already, in checkouts after 7cc8f91
    for message in shard.pull_messages(reply) if written is None else written:
        if not isinstance(message, bytes):
            message.SerializeToString()


def _ignore(name: str, work: Callable[[], None]) -> None:
    work()


if __name__ == "__main__":
    common.run(measure)

"""How long the other workers of a round wait for their answers, from the last worker's push on; over loopback."""

import asyncio
import json
import statistics
import time

import common  # beside this file
import numpy as np

import psclient
from benchmarks.workload.layouts import noise_push, one_tensor
from benchmarks.workload.raw_worker import RawWorker, join_request, push_messages
from benchmarks.workload.replay_worker import ReplayWorker
from pscore.wire.frames import DEFAULT_CHUNK_BYTES

_ROUNDS = {"rounds": json.dumps({"quorum": 0, "seconds": 0, "start_workers": 1})}
_BEFORE_SECONDS = 0.01  # until the pulls of the others have arrived, and wait


def measure(size: int, workers: int, rounds: int, warmup: int = 20) -> dict[str, float]:
    """Close rounds, and time from the moment at which the last worker sends its push.

    Args:
        size: parameters of the model, one tensor; pushes have 1 %.
        workers: how many.
        rounds: that count.
        warmup: rounds before.
    """
    layout = one_tensor(size)
    join = join_request(layout, method_settings=_ROUNDS).SerializeToString()
    update = noise_push(layout, 0.01, 0, np.random.default_rng(0))
    messages = [join, *push_messages(layout, update, DEFAULT_CHUNK_BYTES)]
    with psclient.LocalServer(down_mode="exact", buffers="none", lease_seconds=600) as server:
        address = server.addresses[0]
        with RawWorker(address, layout, "uploader", _ROUNDS):
            pass
        return asyncio.run(_measure(address, messages, workers, rounds, warmup))


async def _measure(address: str, messages: list[bytes], workers: int, rounds: int, warmup: int) -> dict[str, float]:
    crowd = [ReplayWorker(address, f"worker-{number}", messages) for number in range(workers)]
    for worker in crowd:
        await worker.join()
    found = [await _round(crowd) for _ in range(warmup + rounds)][warmup:]
    for worker in crowd:
        await worker.leave()
    waits = [wait for _, others in found for wait in others]
    push = common.median([seconds for seconds, _ in found])
    return {
        "wait_ms": 1e3 * common.median(waits),
        "wait_p90_ms": 1e3 * statistics.quantiles(waits, n=10)[-1],
        "shortest_ms": 1e3 * min(waits),
        "push_ms": 1e3 * push,
        "wait_pushes": common.median(waits) / push,
    }


async def _round(crowd: list[ReplayWorker]) -> tuple[float, list[float]]:
    """Close a round; return the seconds of a push that closes none, and those of the others' waits."""
    last, *others = crowd

    async def exchange(worker: ReplayWorker) -> float:
        await worker.exchange()
        return time.monotonic()

    waiting = []
    for worker in others:
        called = time.monotonic()
        waiting.append(asyncio.create_task(exchange(worker)))
        await asyncio.sleep(_BEFORE_SECONDS)
    pushed = others[-1].pushed - called
    begun = time.monotonic()
    await last.exchange()
    return pushed, [await task - begun for task in waiting]


if __name__ == "__main__":
    common.run(measure)

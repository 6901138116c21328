"""``python -m benchmarks.scale.client``: workers that think, push an encoded update to each shard, and pull.

Nothing is encoded and no reply is decoded here, and torch is not imported: what a real worker computes is a cost of its
own, and these share the machine with the server. It joins, prints ``ready``, begins at a line on stdin, stops at the
next one, and prints its steps as JSON: for each worker a list of :class:`Step`.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.load_generator import read_frames
from benchmarks.workload.replay_worker import ReplayWorker

THINK_SPREAD = 0.5
"""Think times are uniform within this share of their mean, either way; the model draws the same."""


class Step(NamedTuple):
    """One step of a worker; moments on the clock of ``time.monotonic``.

    Attributes:
        began: the pushes.
        pushed: answered by every shard.
        ended: pulled from every shard; ``pushed`` where this step pulled nothing.
        staleness: pushes of others that shard 0 had applied between this worker's last pull and its push.
        sent: message bytes of all shards.
        received: message bytes of all shards.
    """

    began: float
    pushed: float
    ended: float
    staleness: int
    sent: int
    received: int


class Worker:
    """One worker of all shards.

    Args:
        addresses: of the shards, in order.
        name: of the worker.
        files: its updates, by shard; each as :func:`~benchmarks.harness.load_generator.write_frames` has written it.
        think: mean seconds between a pull and the next push.
        pushes: that it makes before it pulls.
    """

    def __init__(
        self, addresses: Sequence[str], name: str, files: Sequence[Sequence[Path]], think: float, pushes: int
    ) -> None:
        self._updates = [[read_frames(path) for path in of] for of in files]
        self._shards = [
            ReplayWorker(address, name, of[0]) for address, of in zip(addresses, self._updates, strict=True)
        ]
        self._think, self._pushes, self._random = think, pushes, random.Random(name)
        self.steps: list[Step] = []

    async def join(self) -> None:
        """Join a run that has its model."""
        for shard in self._shards:
            await shard.join()

    async def run(self, stop: asyncio.Event) -> None:
        """Step until told to stop; the step under way is finished."""
        await _pause(stop, self._random.uniform(0, self._think))
        number = 0
        while not stop.is_set():
            await _pause(stop, self._think * self._random.uniform(1 - THINK_SPREAD, 1 + THINK_SPREAD))
            number += 1
            for shard, updates in zip(self._shards, self._updates, strict=True):
                shard.load(updates[number % len(updates)])
            sent, received = self._sums()
            began, pulls = time.monotonic(), number % self._pushes == 0
            await asyncio.gather(*(shard.exchange() if pulls else shard.push() for shard in self._shards))
            pushed = max(shard.pushed for shard in self._shards)
            ended = time.monotonic() if pulls else pushed
            sent, received = self._sums()[0] - sent, self._sums()[1] - received
            self.steps.append(Step(began, pushed, ended, self._shards[0].staleness, sent, received))

    async def leave(self) -> None:
        """End the leases."""
        for shard in self._shards:
            await shard.leave()

    def _sums(self) -> tuple[int, int]:
        return sum(shard.sent for shard in self._shards), sum(shard.received for shard in self._shards)


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        pass


async def _run_between_lines(workers: Sequence[Worker]) -> None:
    """Print "ready", let all workers run from the next line of stdin to the one after it, and then leave."""
    stop = asyncio.Event()
    for worker in workers:
        await worker.join()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    running = [asyncio.create_task(worker.run(stop)) for worker in workers]
    await asyncio.to_thread(sys.stdin.readline)
    stop.set()
    await asyncio.gather(*running)
    for worker in workers:
        await worker.leave()


async def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.client")
    parser.add_argument("addresses", help="of the shards, with commas between")
    parser.add_argument("updates", type=Path, help="folder of NAME.SHARD.NUMBER files")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--think", type=float, default=0.0, help="mean seconds before a push")
    parser.add_argument("--pushes", type=int, default=1, help="pushes to a pull")
    options = parser.parse_args()
    addresses = options.addresses.split(",")
    workers = []
    for name in options.names:
        files = [sorted(options.updates.glob(f"{name}.{shard}.*")) for shard in range(len(addresses))]
        workers.append(Worker(addresses, name, files, options.think, options.pushes))
    await _run_between_lines(workers)
    print(json.dumps([worker.steps for worker in workers]), flush=True)


if __name__ == "__main__":
    asyncio.run(_main())

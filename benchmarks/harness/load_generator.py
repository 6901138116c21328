"""``python -m benchmarks.harness.load_generator``: workers that replay encoded pushes as fast as servers take them.

Nothing is encoded and no reply is decoded here, and torch is not imported: these workers share the machine with the
servers. It joins, prints ``ready``, begins at a line on stdin and stops at the next one. Then it prints for each worker
a list of :class:`Step` as JSON, and leaves at the end of stdin.
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

from benchmarks.workload.replay_worker import ReplayWorker

THINK_SPREAD = 0.5
"""Think times are uniform within this share of their mean, either way; the scale model draws the same."""

_LENGTH_BYTES = 4


class Step(NamedTuple):
    """One step of a worker; moments on the clock of ``time.monotonic``.

    Attributes:
        began: the pushes.
        pushed: answered by every shard.
        ended: pulled from every shard; ``pushed`` if there are no pulls.
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


def write_frames(path: Path, frames: Sequence[bytes]) -> None:
    """Write serialised messages, each after its length: a join request, a push header, and what follows the header.

    Several shards and several updates follow one another, an update with all its shards before the next one, with an
    empty message between any two.
    """
    with path.open("wb") as file:
        for frame in frames:
            file.write(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)


def read_frames(path: Path) -> list[bytes]:
    """Read what :func:`write_frames` wrote."""
    data, at, frames = memoryview(path.read_bytes()), 0, []
    while at < len(data):
        end = at + _LENGTH_BYTES + int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
        frames.append(bytes(data[at + _LENGTH_BYTES : end]))
        at = end
    return frames


class Worker:
    """One worker of all shards.

    Args:
        addresses: of the shards, in order.
        name: of the worker.
        frames: what it replays.
        think: mean seconds before a push.
        pulls: whether it pulls after each push.
    """

    def __init__(self, addresses: Sequence[str], name: str, frames: Sequence[bytes], think: float, pulls: bool) -> None:
        parts: list[list[bytes]] = [[]]
        for frame in frames:
            if frame:
                parts[-1].append(frame)
            else:
                parts.append([])
        self._updates = [parts[shard :: len(addresses)] for shard in range(len(addresses))]
        self._shards = [
            ReplayWorker(address, name, of[0]) for address, of in zip(addresses, self._updates, strict=True)
        ]
        self._think, self._pulls, self._random = think, pulls, random.Random(name)
        self.steps: list[Step] = []

    async def join(self) -> None:
        """Join a run that has its model."""
        for shard in self._shards:
            await shard.join()

    async def run(self, stop: asyncio.Event) -> None:
        """Step until told to stop; the step under way is finished."""
        await self._pause(stop, self._random.uniform(0, 1))
        while not stop.is_set():
            await self._pause(stop, self._random.uniform(1 - THINK_SPREAD, 1 + THINK_SPREAD))
            for shard, updates in zip(self._shards, self._updates, strict=True):
                shard.load(updates[len(self.steps) % len(updates)])
            sent, received = self._sums()
            began = time.monotonic()
            await asyncio.gather(*(shard.exchange() if self._pulls else shard.push() for shard in self._shards))
            pushed = max(shard.pushed for shard in self._shards)
            ended = time.monotonic() if self._pulls else pushed
            sent, received = self._sums()[0] - sent, self._sums()[1] - received
            self.steps.append(Step(began, pushed, ended, self._shards[0].staleness, sent, received))

    async def leave(self) -> None:
        """End the leases."""
        for shard in self._shards:
            await shard.leave()

    def _sums(self) -> tuple[int, int]:
        return sum(shard.sent for shard in self._shards), sum(shard.received for shard in self._shards)

    async def _pause(self, stop: asyncio.Event, thinks: float) -> None:
        if self._think:
            try:
                async with asyncio.timeout(self._think * thinks):
                    await stop.wait()
            except TimeoutError:
                pass


async def _work(workers: Sequence[Worker]) -> None:
    for worker in workers:
        await worker.join()
    print("ready", flush=True)
    await _line()
    stop = asyncio.Event()
    running = [asyncio.create_task(worker.run(stop)) for worker in workers]
    await _line()
    stop.set()
    await asyncio.gather(*running)
    print(json.dumps([worker.steps for worker in workers]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for worker in workers:
        await worker.leave()


async def _line() -> None:
    await asyncio.to_thread(sys.stdin.readline)


async def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harness.load_generator")
    parser.add_argument("addresses", help="of the shards, with commas between")
    parser.add_argument("frames", type=Path, nargs="+", help="files of write_frames; workers take them in turn")
    parser.add_argument("--names", nargs="+", required=True)
    parser.add_argument("--pulls", action="store_true", help="pull after each push")
    parser.add_argument("--think", type=float, default=0.0, help="mean seconds before a push")
    options = parser.parse_args()
    frames, addresses = [read_frames(path) for path in options.frames], options.addresses.split(",")
    names = enumerate(options.names)
    await _work([Worker(addresses, name, frames[i % len(frames)], options.think, options.pulls) for i, name in names])


if __name__ == "__main__":
    asyncio.run(_main())

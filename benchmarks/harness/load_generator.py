"""``python -m benchmarks.harness.load_generator``: workers that replay encoded pushes as fast as the server takes them.

It joins, prints ``ready``, begins at a line on stdin and goes on until the next one. Then it prints as JSON when each
exchange began and ended and the mean size of a reply, and leaves at the end of stdin.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.workload.replay_worker import ReplayWorker

_LENGTH_BYTES = 4


def write_frames(path: Path, frames: Sequence[bytes]) -> None:
    """Write serialised messages, each after its length: a join request, a push header, and what follows the header."""
    with path.open("wb") as file:
        for frame in frames:
            file.write(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)


def read_frames(path: Path) -> list[bytes]:
    data, at, frames = memoryview(path.read_bytes()), 0, []
    while at < len(data):
        end = at + _LENGTH_BYTES + int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
        frames.append(bytes(data[at + _LENGTH_BYTES : end]))
        at = end
    return frames


async def _exchange(worker: ReplayWorker, pulls: bool, stop: asyncio.Event) -> list[tuple[float, float]]:
    """Push, and pull, until told to stop; what is under way is finished."""
    times: list[tuple[float, float]] = []
    while not stop.is_set():
        started = time.monotonic()
        await (worker.exchange() if pulls else worker.push())
        times.append((started, time.monotonic()))
    return times


async def _work(workers: Sequence[ReplayWorker], pulls: bool) -> None:
    for worker in workers:
        await worker.join()
    print("ready", flush=True)
    await _line()
    stop = asyncio.Event()
    running = [asyncio.create_task(_exchange(worker, pulls, stop)) for worker in workers]
    await _line()
    stop.set()
    times = await asyncio.gather(*running)
    received = sum(worker.received for worker in workers) / max(1, sum(map(len, times)))
    print(json.dumps({"times": times, "reply_bytes": received}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for worker in workers:
        await worker.leave()


async def _line() -> None:
    await asyncio.to_thread(sys.stdin.readline)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.harness.load_generator")
    parser.add_argument("address")
    parser.add_argument("frames", type=Path, nargs="+", help="files of write_frames; workers take them in turn")
    parser.add_argument("--names", nargs="+", required=True)
    parser.add_argument("--pulls", action="store_true", help="pull after each push")
    options = parser.parse_args()
    frames = [read_frames(path) for path in options.frames]

    async def run() -> None:
        workers = [ReplayWorker(options.address, name, frames[i % len(frames)]) for i, name in enumerate(options.names)]
        await _work(workers, options.pulls)

    asyncio.run(run())
    return 0


if __name__ == "__main__":
    sys.exit(main())

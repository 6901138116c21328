"""Load generators as child processes: started together, told when to begin and to stop, killed where they do not."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import psutil

_WARMUP_SHARE = 0.25
_END_SECONDS = 30.0


class Window(NamedTuple):
    """What was seen between two moments.

    Attributes:
        seconds: between them.
        pushes: done, with their pulls where there are any; the parts counted of those that a moment cut.
        server_cpu: seconds of the server process.
        generator_cpu: seconds of all generators.
        reply_bytes: mean of a reply.
    """

    seconds: float
    pushes: float
    server_cpu: float
    generator_cpu: float
    reply_bytes: float


class Generators:
    """Processes that generate load; a context manager.

    Args:
        address: of the server.
        frames: files of :func:`~benchmarks.harness.load_generator.write_frames`, which workers take in turn.
        names: of all workers, dealt out to the processes.
        processes: how many.
        *flags: more for the load generator.
    """

    def __init__(self, address: str, frames: Sequence[Path], names: Sequence[str], processes: int, *flags: str) -> None:
        """Start them and wait until all have joined."""
        self._stack = ExitStack()
        try:
            self._processes = [
                self._start(address, frames, names[i::processes], flags) for i in range(min(processes, len(names)))
            ]
            for process in self._processes:
                if line_of(process).strip() != "ready":
                    raise RuntimeError("a load generator did not get ready; its message is above")
        except BaseException:
            self._stack.close()
            raise

    def measure(self, server: psutil.Process, seconds: float) -> Window:
        """Let them push, and watch all but the beginning."""
        tell(self._processes)
        time.sleep(seconds * _WARMUP_SHARE)
        before = time.monotonic(), cpu([server]), cpu(self._watched())
        time.sleep(seconds)
        after = time.monotonic(), cpu([server]), cpu(self._watched())
        tell(self._processes)
        reports = [json.loads(line_of(process)) for process in self._processes]
        exchanges = [exchange for report in reports for times in report["times"] for exchange in times]
        pushes = sum(push_share(exchange, before[0], after[0]) for exchange in exchanges)
        reply_bytes = statistics.fmean(report["reply_bytes"] for report in reports)
        return Window(after[0] - before[0], pushes, after[1] - before[1], after[2] - before[2], reply_bytes)

    def __enter__(self) -> "Generators":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(
        self, address: str, frames: Sequence[Path], names: Sequence[str], flags: Sequence[str]
    ) -> "subprocess.Popen[str]":
        paths = [str(path) for path in frames]
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.harness.load_generator", address, *paths, *flags, "--names", *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(end, process)
        return process

    def _watched(self) -> list[psutil.Process]:
        return [psutil.Process(process.pid) for process in self._processes]


def push_share(push: tuple[float, float], start: float, end: float) -> float:
    """Return how much of a push falls between two moments."""
    began, done = push
    return max(0.0, min(done, end) - max(began, start)) / max(done - began, 1e-9)


def tell(processes: "Sequence[subprocess.Popen[str]]") -> None:
    """Write an empty line to each."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def line_of(process: "subprocess.Popen[str]") -> str:
    """Read a line; each call of a generator has a deadline, so one comes or the process ends."""
    assert process.stdout is not None
    return process.stdout.readline()


def cpu(processes: Sequence[psutil.Process]) -> float:
    """Return their CPU seconds so far."""
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def end(process: "subprocess.Popen[str]") -> None:
    """Close its stdin, at which it stops and leaves; kill it where it does not."""
    try:
        process.communicate(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()

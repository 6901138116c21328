"""Load generators as child processes: started together, told when to begin and to stop, killed where they do not."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import NamedTuple

import numpy as np
import psutil

from benchmarks.harness.load_generator import Step

_WARMUP_SHARE = 0.25
_END_SECONDS = 30.0


class NoStepError(RuntimeError):
    """No step ended while the workers were watched."""


class Window(NamedTuple):
    """What was seen between two moments. A step is one of one worker with all shards.

    Attributes:
        seconds: between them.
        pushes: steps done; the parts counted of those that a moment cut.
        server_cpu: seconds of all server processes.
        generator_cpu: seconds of all generators.
        staleness: mean of the steps that ended.
        staleness_90: their 90th percentile.
        sent: mean bytes of a step, up.
        received: mean bytes of a step, down.
        push_seconds: mean, from the first byte to the last shard's answer.
        pull_seconds: mean, from then to the end of the step.
    """

    seconds: float
    pushes: float
    server_cpu: float
    generator_cpu: float
    staleness: float
    staleness_90: float
    sent: float
    received: float
    push_seconds: float
    pull_seconds: float

    @property
    def rate(self) -> float:
        """Steps a second of all workers."""
        return self.pushes / self.seconds

    @classmethod
    def of(
        cls,
        steps: Sequence[Sequence[Step]],
        before: tuple[float, float, float],
        after: tuple[float, float, float],
    ) -> "Window":
        """Sum steps up, by worker, between two moments: each a clock's time, CPU seconds of servers and generators."""
        inside = [step for worker in steps for step in worker if before[0] <= step.ended <= after[0]]
        if not inside:
            raise NoStepError("no step ended while the workers were watched")
        staleness = [step.staleness for step in inside]
        return cls(
            after[0] - before[0],
            sum(push_share((step.began, step.ended), before[0], after[0]) for worker in steps for step in worker),
            after[1] - before[1],
            after[2] - before[2],
            fmean(staleness),
            float(np.percentile(staleness, 90)),
            fmean(step.sent for step in inside),
            fmean(step.received for step in inside),
            fmean(step.pushed - step.began for step in inside),
            fmean(step.ended - step.pushed for step in inside),
        )


class Generators:
    """Processes that generate load; a context manager.

    Args:
        address: of the server, or those of all shards with commas between.
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
                self._start(address, frames[i::processes] or frames, names[i::processes], flags)
                for i in range(min(processes, len(names)))
            ]
            for process in self._processes:
                if _line_of(process).strip() != "ready":
                    raise RuntimeError("a load generator did not get ready; its message is above")
        except BaseException:
            self._stack.close()
            raise

    def measure(
        self,
        server: psutil.Process,
        seconds: float,
        settle_seconds: float | None = None,
        others: Sequence[psutil.Process] = (),
    ) -> Window:
        """Let them push, and watch all but the beginning.

        Args:
            server: process of the first shard.
            seconds: to watch.
            settle_seconds: before that; by default a quarter of it.
            others: processes of the other shards.
        """
        servers = [server, *others]
        _tell(self._processes)
        time.sleep(seconds * _WARMUP_SHARE if settle_seconds is None else settle_seconds)
        before = time.monotonic(), _cpu(servers), _cpu(self._watched())
        time.sleep(seconds)
        after = time.monotonic(), _cpu(servers), _cpu(self._watched())
        _tell(self._processes)
        reports = [json.loads(_line_of(process)) for process in self._processes]
        return Window.of([[Step(*step) for step in worker] for report in reports for worker in report], before, after)

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
        self._stack.callback(_end, process)
        return process

    def _watched(self) -> list[psutil.Process]:
        return [psutil.Process(process.pid) for process in self._processes]


def push_share(push: tuple[float, float], start: float, end: float) -> float:
    """Return how much of a push falls between two moments."""
    began, done = push
    return max(0.0, min(done, end) - max(began, start)) / max(done - began, 1e-9)


def _tell(processes: "Sequence[subprocess.Popen[str]]") -> None:
    """Write an empty line to each."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def _line_of(process: "subprocess.Popen[str]") -> str:
    """Read a line; each call of a generator has a deadline, so one comes or the process ends."""
    assert process.stdout is not None
    return process.stdout.readline()


def _cpu(processes: Sequence[psutil.Process]) -> float:
    """Return their CPU seconds so far."""
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def _end(process: "subprocess.Popen[str]") -> None:
    """Close its stdin, at which it stops and leaves; kill it where it does not."""
    try:
        process.communicate(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()

"""Real runs: server processes and clients on loopback, watched for a while."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import psutil

from benchmarks.harness.generators import cpu, end, line_of, push_share, tell
from benchmarks.scale import updates
from benchmarks.scale.client import Step
from benchmarks.workload.layouts import one_tensor
from psclient.rpc.local_server import LocalServer

CLIENT_PROCESSES = 2
"""That the clients of a run are dealt out to."""

_WARM_SECONDS = 1.0
_MOST_WARM_RUNS = 30


class NoStepError(RuntimeError):
    """No step ended while the clients were watched."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen, a step meaning one of one worker with all shards.

    Attributes:
        steps_per_second: of all workers.
        staleness: mean.
        staleness_90: 90th percentile.
        sent: bytes a step, up.
        received: bytes a step, down.
        push_seconds: mean, from the first byte to the last shard's answer.
        pull_seconds: mean, of the steps that pull.
        server_cpu: seconds a step, of all server processes.
        client_cpu: seconds a step, of all client processes.
        steps: that were counted.
    """

    steps_per_second: float
    staleness: float
    staleness_90: float
    sent: float
    received: float
    push_seconds: float
    pull_seconds: float
    server_cpu: float
    client_cpu: float
    steps: float

    def plain(self) -> dict[str, float]:
        return asdict(self)


class Stage:
    """Servers with a model, and updates for clients; a context manager.

    Args:
        size: elements of the model.
        density: of a push.
        shards: servers.
        workers: most clients that will be asked for.
        down_mode: of the servers.
        seed: of the updates.

    Attributes:
        layout: of the model.
        addresses: of the servers.
    """

    def __init__(self, size: int, density: float, shards: int, workers: int, down_mode: str, seed: int) -> None:
        """Start the servers and give them the model."""
        self._stack = ExitStack()
        try:
            self._server = self._stack.enter_context(
                LocalServer(shards, down_mode=down_mode, down_density=density, buffers="none", lease_seconds=600)
            )
            self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            self._names = [f"w{number:03}" for number in range(workers)]
            self.layout = one_tensor(size)
            self.addresses = self._server.addresses
            updates.write(self._directory, self.layout, density, shards, self._names, seed)
            updates.upload(self.addresses, self.layout)
        except BaseException:
            self._stack.close()
            raise

    def warm_up(self, workers: int) -> None:
        """Let clients work until steps end: the servers compile their loops, on a new machine for many seconds."""
        for _ in range(_MOST_WARM_RUNS):
            try:
                self.run(workers, 0.0, 1.0)
            except NoStepError:
                continue
            return
        raise NoStepError(f"no step ended in {_MOST_WARM_RUNS} runs of {workers} clients")

    def run(self, workers: int, think: float, seconds: float, pushes: int = 1) -> Seen:
        """Let clients work, and watch them for a while; the beginning is not counted."""
        names = self._names[:workers]
        with ExitStack() as stack:
            count = min(CLIENT_PROCESSES, workers)
            processes = [self._client(names[i::count], think, pushes) for i in range(count)]
            for process in processes:
                stack.callback(end, process)
            for process in processes:
                if line_of(process).strip() != "ready":
                    raise RuntimeError("clients did not get ready; their message is above")
            tell(processes)
            time.sleep(_WARM_SECONDS + 2 * think)
            before = time.monotonic(), self.server_cpu(), cpu_of(processes)
            time.sleep(seconds)
            after = time.monotonic(), self.server_cpu(), cpu_of(processes)
            tell(processes)
            steps = [
                [Step(*step) for step in worker] for process in processes for worker in json.loads(line_of(process))
            ]
        return summary(steps, before, after)

    def server_cpu(self) -> float:
        """Return the CPU seconds of all servers so far."""
        return cpu_of(self._server.processes)

    def memory(self) -> list[int]:
        """Return the resident bytes of each server."""
        return [psutil.Process(process.pid).memory_info().rss for process in self._server.processes]

    def __enter__(self) -> "Stage":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _client(self, names: Sequence[str], think: float, pushes: int) -> "subprocess.Popen[str]":
        addresses = ",".join(self.addresses)
        options = [f"--think={think}", f"--pushes={pushes}"]
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scale.client", *options, addresses, str(self._directory), *names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


def summary(
    steps: Sequence[Sequence[Step]], before: tuple[float, float, float], after: tuple[float, float, float]
) -> Seen:
    """Sum steps up, by worker, between two moments: each a clock's time, the servers' and the clients' CPU seconds."""
    seconds = after[0] - before[0]
    count = sum(push_share((step.began, step.ended), before[0], after[0]) for worker in steps for step in worker)
    inside = [step for worker in steps for step in worker if before[0] <= step.ended <= after[0]]
    if not inside:
        raise NoStepError("no step ended while the clients were watched")
    pulls = [step for step in inside if step.received]
    staleness = [step.staleness for step in inside]
    return Seen(
        steps_per_second=count / seconds,
        staleness=fmean(staleness),
        staleness_90=float(np.percentile(staleness, 90)),
        sent=fmean(step.sent for step in inside),
        received=fmean(step.received for step in inside),
        push_seconds=fmean(step.pushed - step.began for step in inside),
        pull_seconds=fmean(step.ended - step.pushed for step in pulls) if pulls else 0.0,
        server_cpu=(after[1] - before[1]) / count,
        client_cpu=(after[2] - before[2]) / count,
        steps=count,
    )


def cpu_of(processes: Sequence["subprocess.Popen[Any]"]) -> float:
    """Return the CPU seconds of processes so far."""
    return cpu([psutil.Process(process.pid) for process in processes])

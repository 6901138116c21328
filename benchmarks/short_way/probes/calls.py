"""What pushes and exact pulls cost a server whose workers have a connection each; or what an echo of them costs."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

import psclient
from benchmarks.harness.generators import Generators
from benchmarks.sections.load import write_push
from benchmarks.short_way.probes import common
from benchmarks.workload.layouts import noise_push, one_tensor
from benchmarks.workload.raw_worker import RawWorker

_UPDATES = 16
"""Different pushes, which workers take in turn."""

_WARMUP = 20


def measure(size: int, workers: int, seconds: float, echo_bytes: float = 0.0, limit: int = 0) -> dict[str, float]:
    """Let workers push 1 % of a model and pull, without a pause.

    Args:
        size: parameters of the model, one tensor.
        workers: how many.
        seconds: of the window, after a warm-up.
        echo_bytes: of a reply where the server is an echo; 0 for psservice.
        limit: where not 0, workers make that many exchanges, then stay connected, and memory and threads are read.
    """
    layout = one_tensor(size)
    names = [f"worker-{number}" for number in range(workers)]
    with tempfile.TemporaryDirectory() as folder:
        frames = [write_push(Path(folder), layout, 0.01, seed)[0] for seed in range(min(workers, _UPDATES))]
        if echo_bytes:
            return _echo(frames, names, seconds, round(echo_bytes))
        with psclient.LocalServer(down_mode="exact", buffers="none", lease_seconds=600) as server:
            address, process = server.addresses[0], psutil.Process(server.processes[0].pid)
            with RawWorker(address, layout, "uploader") as first:
                for _ in range(_WARMUP):  # what compiles, compiles now
                    first.push(noise_push(layout, 0.01, 0, np.random.default_rng(0)))
                    first.pull()
            if limit:
                return _connected(address, process, frames, names, limit)
            with Generators(address, frames, names, os.cpu_count() or 1, "--pulls") as generators:
                return _figures(generators, process, seconds)


def _figures(generators: Generators, server: psutil.Process, seconds: float) -> dict[str, float]:
    window = generators.measure(server, seconds)
    return {
        "cpu_ms": 1e3 * window.server_cpu / window.pushes,
        "rate": window.pushes / window.seconds,
        "generator_ms": 1e3 * window.generator_cpu / window.pushes,
        "reply_bytes": window.reply_bytes,
    }


def _connected(
    address: str, server: psutil.Process, frames: Sequence[Path], names: Sequence[str], limit: int
) -> dict[str, float]:
    """Return what each further worker that is connected and idle adds to the server."""
    seen = []
    for count in (1, len(names)):
        with Generators(address, frames, names[:count], 1, "--pulls", "--limit", str(limit)) as generators:
            generators.finish()
            seen.append((server.num_threads(), server.memory_info().rss))
    (threads, resident), (more_threads, more_resident) = seen
    return {
        "threads_more": more_threads - threads,
        "kib_a_worker": (more_resident - resident) / 1024 / (len(names) - 1),
    }


def _echo(frames: Sequence[Path], names: Sequence[str], seconds: float, reply_bytes: int) -> dict[str, float]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.workload.echo", str(reply_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        address = f"127.0.0.1:{process.stdout.readline().strip()}"
        with Generators(address, frames, names, os.cpu_count() or 1, "--pulls", "--echo") as generators:
            return _figures(generators, psutil.Process(process.pid), seconds)
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    common.run(measure)

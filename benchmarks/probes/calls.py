"""What pushes and exact pulls cost a server whose workers have a connection each."""

import os
import tempfile
from pathlib import Path

import common  # beside this file
import numpy as np
import psutil

import psclient
from benchmarks.harness.generators import Generators
from benchmarks.harness.load_generator import write_frames
from benchmarks.workload.layouts import noise_push, one_tensor
from benchmarks.workload.raw_worker import RawWorker, join_request, push_messages
from pscore.model.layout import ModelLayout
from pscore.wire.frames import DEFAULT_CHUNK_BYTES

_UPDATES = 16
"""Different pushes, which workers take in turn."""

_WARMUP = 20


def measure(size: int, workers: int, seconds: float) -> dict[str, float]:
    """Let workers push 1 % of a model and pull, without a pause.

    Args:
        size: parameters of the model, one tensor.
        workers: how many.
        seconds: of the window, after a warm-up.
    """
    layout = one_tensor(size)
    names = [f"worker-{number}" for number in range(workers)]
    with tempfile.TemporaryDirectory() as folder:
        frames = [_write_push(Path(folder) / str(seed), layout, seed) for seed in range(min(workers, _UPDATES))]
        with psclient.LocalServer(down_mode="exact", buffers="none", lease_seconds=600) as server:
            address, process = server.addresses[0], psutil.Process(server.processes[0].pid)
            with RawWorker(address, layout, "uploader") as first:
                for _ in range(_WARMUP):  # what compiles, compiles now
                    first.push(noise_push(layout, 0.01, 0, np.random.default_rng(0)))
                    first.pull()
            with Generators(address, frames, names, os.cpu_count() or 1, "--pulls") as generators:
                window = generators.measure(process, seconds)
    return {
        "cpu_ms": 1e3 * window.server_cpu / window.pushes,
        "rate": window.pushes / window.seconds,
        "generator_ms": 1e3 * window.generator_cpu / window.pushes,
    }


def _write_push(path: Path, layout: ModelLayout, seed: int) -> Path:
    """Encode a push of 1 % once for all."""
    push = noise_push(layout, 0.01, 0, np.random.default_rng(seed))
    write_frames(path, [join_request(layout).SerializeToString(), *push_messages(layout, push, DEFAULT_CHUNK_BYTES)])
    return path


if __name__ == "__main__":
    common.run(measure)

"""``python -m benchmarks.scale.memory``: the peaks of a worker's and a server's memory with a large model.

A worker joins, takes steps, a snapshot is taken, the server is started again, the worker takes another step, and a
second worker joins. The peaks are the kernel's (``VmHWM``), which is reset between two phases.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import machine
from benchmarks.scale.memory_worker import METHODS
from psclient.rpc.local_server import LocalServer

_LAST_SNAPSHOT_SECONDS = 600.0  # that a server may take for the snapshot at its end
_PEAK, _NOW = "VmHWM", "VmRSS"
_RESET_PEAK = "5"  # what the kernel's clear_refs takes for that


class Row(NamedTuple):
    """Bytes of one phase: the peaks, and the resident set at its end."""

    phase: str
    worker_peak: int
    worker: int
    server_peak: int
    server: int


class _Worker:
    """A worker's process, phase by phase."""

    def __init__(self, server: str, options: argparse.Namespace, *flags: str) -> None:
        names = ("method", "shape", "elements", "dtype", "steps")
        given = [f"--{name}={getattr(options, name)}" for name in names]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scale.memory_worker", server, *given, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.trained = self.elements = self.tensors = 0

    def await_phase(self) -> str:
        """Return the name of the phase that has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker ended with status {self.process.wait()}")
        phase, *counts = line.rsplit(maxsplit=3)
        self.trained, self.elements, self.tensors = map(int, counts)
        return phase

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def measure(options: argparse.Namespace) -> tuple[list[Row], _Worker]:
    """Run a worker and a server; return the phases, and the worker with its counts."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.disk) as folder:
        settings: dict[str, object] = {"data_dir": folder, "durability": options.durability}
        with LocalServer(down_mode=options.down_mode, **settings) as server:
            worker = _Worker(server.server, options)
            try:
                while True:
                    phase = worker.await_phase()
                    if phase == "snapshot":
                        _checkpoint(server.server)
                    rows.append(_row(phase, worker.process.pid, server.processes[0].pid))
                    print(_line(rows[-1]), flush=True)
                    if phase == "restart":
                        break
                    if phase == "snapshot":
                        server.processes[0].terminate()
                        server.processes[0].wait(_LAST_SNAPSHOT_SECONDS)
                        server.restart()
                    worker.go_on()
            finally:
                worker.end()
            second = _Worker(server.server, options, "--only-joins")
            try:
                while (phase := second.await_phase()) != "join":
                    _row(phase, second.process.pid, server.processes[0].pid)
                    second.go_on()
                rows.append(_row("another worker joins", second.process.pid, server.processes[0].pid))
                print(_line(rows[-1]), flush=True)
            finally:
                second.end()
    return rows, worker


def _checkpoint(server: str) -> None:
    command = [sys.executable, "-m", "psservice", "checkpoint", "create", server]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _row(phase: str, worker: int, server: int) -> Row:
    """Read the peaks since the last call, and reset them."""
    row = Row(phase, *_resident(worker), *_resident(server))
    for process in (worker, server):
        Path(f"/proc/{process}/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    return row


def _resident(process: int) -> tuple[int, int]:
    """Return the peak of a process's resident set since the last reset, and its size now, in bytes."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    peak, now = (next(line for line in lines if line.startswith(f"{name}:")).split()[1] for name in (_PEAK, _NOW))
    return int(peak) << 10, int(now) << 10


def _line(row: Row) -> str:
    worker, server = (f"{peak / 1e9:7.2f} {now / 1e9:7.2f}" for peak, now in (row[1:3], row[3:5]))
    return f"{row.phase:22}  {worker}   {server}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one model with one method, and print the phases."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.memory", description=__doc__)
    parser.add_argument("--method", choices=METHODS, default="rmsprop")
    parser.add_argument("--shape", choices=("tensors", "transformer", "lora"), default="transformer")
    parser.add_argument("--elements", type=int, default=100_000_000, help="of the model, frozen ones too")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--down-mode", choices=("exact", "topk", "auto"), default="exact")
    parser.add_argument("--durability", choices=("snapshot", "journal"), default="snapshot")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--disk", type=Path, help="where the data directory is made")
    options = parser.parse_args(given)
    for sentence in machine.sentences(machine.describe("benchmarks.scale.memory", given)):
        print(sentence)
    print("GB: peak and then the end of each phase, of the worker and of the server")
    _, worker = measure(options)
    print(f"{worker.elements:,} elements, {worker.trained:,} of them trained in {worker.tensors} tensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())

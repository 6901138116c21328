"""Section *peers*: the same training job with other parameter servers of the PyTorch world, in the same run."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

import psclient
from benchmarks.harness import plots
from benchmarks.harness.children import Child, ChildFailedError
from benchmarks.harness.section import Plan, Section, Table
from benchmarks.harness.timing import Stat
from benchmarks.peers import gloo, ours
from benchmarks.peers.task import LEARNING_RATE, WORKERS, Job, model_of
from benchmarks.workload import socket_bytes
from benchmarks.workload.socket_bytes import Traffic
from psclient.errors import SparsepsError

KEY, TITLE = "peers", "The same training with other parameter servers"

_START_SECONDS, _STEP_SECONDS = 60.0, 2.0
_GLOO = "gloo, isend/irecv a tensor"


class Result(NamedTuple):
    steps_per_second: float
    up: float
    down: float
    server_cpu: float
    loss: float
    accuracy: float


class Parties(NamedTuple):
    """A server and workers that run."""

    server_pid: int
    workers: Sequence[Child]


def run(plan: Plan) -> Section:
    """Let each peer train in turn, round after round."""
    job = Job(steps=30 if plan.quick else 200, seed=plan.seed)
    peers = _peers(job, plan.density)
    found: dict[str, list[Result]] = {name: [] for name in peers}
    failures: dict[str, str] = {}
    for turn in range(1 if plan.quick else 3):
        for name, start in peers.items():
            if name in failures or (turn and not plan.has_time(len(peers) * 10)):
                continue
            plan.say(name)
            try:
                with start() as parties:
                    found[name].append(measure(job, parties))
            except (ChildFailedError, SparsepsError, psutil.Error) as error:
                failures[name] = str(error)
    return _section(job, {name: results for name, results in found.items() if results}, failures)


def _peers(job: Job, density: float) -> dict[str, Callable[[], AbstractContextManager[Parties]]]:
    return {
        _GLOO: lambda: through_torch(gloo.server, gloo.worker, job),
        "sparseps, ASGD (dense)": lambda: through_us("asgd", job, density),
        f"sparseps, DGS {density:.0%}": lambda: through_us("dgs", job, density),
    }


@contextmanager
def through_torch(serve: Callable[..., None], work: Callable[..., None], job: Job) -> Iterator[Parties]:
    """Start a server and workers that meet at a file."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        rendezvous = f"file://{Path(directory) / 'rendezvous'}"
        server = stack.enter_context(Child("server", serve, job, rendezvous))
        workers = [
            stack.enter_context(Child(f"worker {number}", work, job, rendezvous, number)) for number in range(WORKERS)
        ]
        yield Parties(server.pid, workers)
        server.tell()


@contextmanager
def through_us(method: str, job: Job, density: float) -> Iterator[Parties]:
    """Start our server and workers with ``asgd`` or ``dgs``."""
    with psclient.LocalServer() as server, ExitStack() as stack:
        address = server.addresses[0]
        workers = [
            stack.enter_context(Child(f"worker {number}", ours.worker, job, address, method, density, number))
            for number in range(WORKERS)
        ]
        yield Parties(server.processes[0].pid, workers)


def measure(job: Job, parties: Parties) -> Result:
    """Let all workers warm up, then train together; read the server's counters before and after."""
    server = psutil.Process(parties.server_pid)
    for worker in parties.workers:
        worker.hear(_START_SECONDS)
    before = _counters(server)
    for worker in parties.workers:
        worker.tell()
    reports = [worker.hear(job.steps * _STEP_SECONDS) for worker in parties.workers]
    after = _counters(server)
    for worker in parties.workers:
        worker.tell()
    steps = job.steps * WORKERS
    moved = after[0].since(before[0])
    return Result(
        steps_per_second=sum(job.steps / report["seconds"] for report in reports),
        up=moved.received / steps,
        down=moved.sent / steps,
        server_cpu=(after[1] - before[1]) / steps,
        loss=sum(report["loss"] for report in reports) / len(reports),
        accuracy=sum(report["accuracy"] for report in reports) / len(reports),
    )


def _counters(server: psutil.Process) -> tuple[Traffic, float]:
    traffic = socket_bytes.of_process(server.pid) if socket_bytes.available() else Traffic(0, 0)
    times = server.cpu_times()
    return traffic, times.user + times.system


def _section(job: Job, found: dict[str, list[Result]], failures: dict[str, str]) -> Section:
    section = Section(KEY, TITLE)
    stats = {name: [Stat.of(values) for values in zip(*results, strict=True)] for name, results in found.items()}
    rows = []
    for name, numbers in stats.items():
        found_here = Result(*(stat.median for stat in numbers))
        base = Result(*(stat.median for stat in stats[_GLOO])) if _GLOO in stats else None
        rows.append(
            (
                name,
                f"{found_here.steps_per_second:.3g}",
                _bytes(found_here.up),
                _bytes(found_here.down),
                f"{found_here.server_cpu * 1e3:.2f}",
                f"{found_here.loss:.3f}",
                f"{found_here.accuracy:.1%}",
                *(_ratios(found_here, base) if base else ("", "", "")),
            )
        )
        section.figures[name] = {field: stat.plain() for field, stat in zip(Result._fields, numbers, strict=True)}
    for name, error in failures.items():
        rows.append((f"{name}: failed", *[""] * 9))
        section.figures[name] = {"failed": error}
        section.notes.append(f"{name} failed: {error}")
    size = sum(parameter.numel() for parameter in model_of(job).parameters())
    heads = ("peer", "steps/s", "up, MB", "down, MB", "server CPU, ms", "loss", "accuracy", "steps", "bytes", "CPU")
    title = f"{WORKERS} workers and a server on loopback, {size:,} parameters; the last three columns over gloo's"
    section.tables.append(Table(title, heads, rows))
    speeds = [(name, numbers[0].median) for name, numbers in stats.items()]
    if speeds:
        caption = "Both workers together. On loopback, where bytes are free: the gain of sparse pushes is in a network."
        section.plots.append(plots.bars("peers", "Steps a second of each peer", caption, "steps a second", speeds))
    rounds = max((len(results) for results in found.values()), default=0)
    section.notes += [
        f"The same network, digits, batches and seed for all; SGD at {LEARNING_RATE:g}, applied by the server as it "
        f"arrives (DGS: momentum 0.7 and a learning rate that makes steps of the same size). {job.steps} steps a "
        f"worker after a warm-up, {rounds} round(s), one torch thread in each process, loss over the last tenth of the "
        "steps, accuracy of the workers' replicas on images that were held out.",
        "Bytes are TCP payload a step, by the kernel's counters of the server's own sockets (ss), protocol framing "
        "included."
        if socket_bytes.available()
        else "Bytes were not measured: ss (iproute2) is missing.",
    ]
    return section


def _bytes(size: float) -> str:
    return f"{size / 1e6:.3f}" if size else "–"


def _ratios(result: Result, base: Result) -> tuple[str, ...]:
    pairs = (
        (result.steps_per_second, base.steps_per_second),
        (result.up + result.down, base.up + base.down),
        (result.server_cpu, base.server_cpu),
    )
    return tuple(f"×{ours / theirs:.3g}" if theirs else "–" for ours, theirs in pairs)

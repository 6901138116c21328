"""What is measured: networks, scenarios, numbers of workers; the main question's cells first."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.compare.methods import METHODS
from benchmarks.compare.processes import Child, server
from benchmarks.compare.tasks import TASKS
from benchmarks.network.lab import Lab
from benchmarks.network.longline import LongLine
from benchmarks.rivals.contenders import CONTENDERS
from benchmarks.rivals.worker import BUDGET, Job, Told, average_and_train, serve_and_train

TASK, SAMPLES = "text-tiny", 8192
SLOWNESS = 4.0
"""Of the last worker, where one is slower."""
PACES = {4: 0.1, 8: 0.2}
"""Seconds of a step by the number of workers: more than two shared cores need for a gradient of each at once."""
PACKET_BYTES = 9000
_START_SECONDS, _STEP_SECONDS = 120.0, 30.0


class Cell(NamedTuple):
    """One row of the tables.

    Attributes:
        mbits: of every host's card, each way.
        delay_ms: one way, between any two hosts.
        slow: the last worker's steps last :data:`SLOWNESS` times as long.
        workers: how many.
    """

    mbits: float
    delay_ms: float
    slow: bool
    workers: int

    @property
    def words(self) -> str:
        scenario = f"one {SLOWNESS:g} × slower" if self.slow else "all equal"
        return f"{self.mbits:g} Mbit/s, {self.delay_ms:g} ms, {scenario}"

    @contextmanager
    def network(self) -> Iterator[Lab]:
        """Make it: a host for each worker, and one more for the server."""
        hosts, rate = self.workers + 1, self.mbits * 1e6
        with (
            LongLine(hosts, rate, self.delay_ms / 1e3, packet_bytes=PACKET_BYTES) if self.delay_ms else Lab(hosts, rate)
        ) as lab:
            yield lab


def cells(quick: bool) -> list[Cell]:
    """Return the cells, those that matter most first; none with a delay at a rate that the switch does not carry."""
    if quick:
        return [Cell(100, 0, False, 4)]
    lines = ((100, 0), (100, 20), (10, 0), (10, 20), (100, 80), (10, 80), (1000, 0))
    four = [Cell(mbits, delay, slow, 4) for mbits, delay in lines for slow in (False, True)]
    eight = [cell._replace(workers=8) for cell in four]
    return [*four[:8], *eight[:4], *four[8:], *eight[4:]]


def train(job: Job, lab: Lab | None = None) -> list[Told]:
    """Run all workers of a job in a network, or on loopback; return what each tells.

    Raises:
        ChildFailedError: a process failed, or did not answer in time.
    """
    contender = CONTENDERS[job.contender]
    with ExitStack() as stack:
        spaces = [lab.space(rank) if lab else "" for rank in range(job.workers)]
        if contender.method:
            listen = {"listen": f"{lab.address(job.workers)}:0", "insecure": True} if lab else {}
            settings = {**BUDGET.server, **METHODS[contender.method].server(job.workers), **listen}
            address = stack.enter_context(server(settings, lab.space(job.workers) if lab else ""))
            work: Callable[..., None] = serve_and_train
            others: tuple[str, ...] = (address,)
        else:
            folder = stack.enter_context(TemporaryDirectory())
            work, others = average_and_train, ((Path(folder) / "meeting").as_uri(), "card" if lab else "lo")
        workers = [
            stack.enter_context(Child(f"worker {rank} of {job.contender}", work, job, rank, spaces[rank], *others))
            for rank in range(job.workers)
        ]
        for worker in workers:
            worker.hear(_START_SECONDS)
        for worker in workers:
            worker.tell()
        seconds = _START_SECONDS + job.all_steps * (_STEP_SECONDS + job.pace * job.slowness)
        return [worker.hear(seconds) for worker in workers]


def job_of(contender: str, inner: str, rate: float, workers: int, seed: int, samples: int) -> Job:
    """Return a job of full length without pace."""
    steps = samples // (TASKS[TASK].batch_size * workers)
    return Job(TASK, contender, inner, rate, workers, seed, samples, steps)

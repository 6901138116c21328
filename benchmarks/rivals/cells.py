"""What is measured: networks, scenarios, numbers of workers; the main question's cells first."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.campaign.methods import METHODS
from benchmarks.campaign.processes import server
from benchmarks.campaign.tasks import TASKS
from benchmarks.harness.children import Child, begin
from benchmarks.network.lab import Lab
from benchmarks.network.longline import LongLine
from benchmarks.rivals.contenders import CONTENDERS
from benchmarks.rivals.synchronous import average_and_train
from benchmarks.rivals.worker import BUDGET, Job, Told, serve_and_train

TASK = "text-tiny"
SLOWNESS = 4.0
"""Of the last worker, where one is slower."""
ABSENT_SECONDS = 10.0
"""From the end of the last worker, where one is lost, until another takes its place."""
SCENARIOS = {
    "equal": "all equal",
    "slow": f"one {SLOWNESS:g} × slower",
    "lost": f"one lost half-way, another after {ABSENT_SECONDS:g} s",
}
PACES = {4: 0.1, 8: 0.2, 16: 0.4}
"""Seconds of a step by the number of workers: more than two shared cores need for a gradient of each at once."""
PACKET_BYTES = 9000
LINES = ((100, 0), (100, 20), (10, 20), (10, 0), (100, 80), (10, 80), (1000, 0))
"""Mbit/s of every card, and milliseconds one way."""
SEEDS = (0, 1, 2)
"""Of the cells that decide; of the others the first alone."""
DECIDING = 3
"""Networks whose cells decide, with 8 workers that are all there."""
_START_SECONDS, _STEP_SECONDS = 120.0, 30.0


class Cell(NamedTuple):
    """One row of the tables.

    Attributes:
        mbits: of every host's card, each way.
        delay_ms: one way, between any two hosts.
        scenario: key of :data:`SCENARIOS`: what becomes of the last worker.
        workers: how many.
    """

    mbits: float
    delay_ms: float
    scenario: str
    workers: int

    @property
    def words(self) -> str:
        return f"{self.mbits:g} Mbit/s, {self.delay_ms:g} ms, {SCENARIOS[self.scenario]}"

    @contextmanager
    def network(self) -> Iterator[Lab]:
        """Make it: a host for each worker, and one more for the server."""
        hosts, rate = self.workers + 1, self.mbits * 1e6
        with (
            LongLine(hosts, rate, self.delay_ms / 1e3, packet_bytes=PACKET_BYTES) if self.delay_ms else Lab(hosts, rate)
        ) as lab:
            yield lab


SMOKE_CONTENDERS, SMOKE_RATE, SMOKE_OPTIMIZER = ("rmsprop", "ddp"), 0.125, "SGD"
"""What runs where nothing but whether it runs is asked."""


def cells(quick: bool) -> list[Cell]:
    """Return the cells, those that decide first; none with a delay at a rate that the switch does not carry."""
    if quick:
        return [Cell(100, 0, "equal", 4)]
    every = [Cell(*line, scenario, workers) for workers in (8, 4) for line in LINES for scenario in SCENARIOS]
    return [*filter(decides, every), *(cell for cell in every if not decides(cell)), Cell(100, 20, "equal", 16)]


def decides(cell: Cell) -> bool:
    """Tell whether a cell is one of those that are measured with several seeds."""
    return cell.workers == 8 and cell.scenario != "lost" and (cell.mbits, cell.delay_ms) in LINES[:DECIDING]


def train(job: Job, lab: Lab | None = None) -> list[Told]:
    """Run all workers of a job in a network, or on loopback; return what each tells that is there at the end.

    Raises:
        ChildFailedError: a process failed, or did not answer in time.
    """
    contender = CONTENDERS[job.contender]
    with ExitStack() as stack:

        def start(rank: int) -> Child:
            space = lab.space(min(rank, job.workers - 1)) if lab else ""  # a worker that comes late has the lost one's
            return stack.enter_context(Child(f"worker {rank} of {job.contender}", work, job, rank, space, *others))

        if contender.method:
            listen = {"listen": f"{lab.address(job.workers)}:0", "insecure": True} if lab else {}
            settings = {**BUDGET.server, **METHODS[contender.method].server(job.workers), **listen}
            address = stack.enter_context(server(settings, lab.space(job.workers) if lab else ""))
            work: Callable[..., None] = serve_and_train
            others: tuple[str, ...] = (address,)
        else:
            folder = stack.enter_context(TemporaryDirectory())
            work, others = average_and_train, (Path(folder).as_uri(), "card" if lab else "lo")
        workers = [start(rank) for rank in range(job.workers)]
        begin(workers, _START_SECONDS)
        seconds = _START_SECONDS + job.all_steps * (_STEP_SECONDS + job.pace * job.slowness)
        if job.lost_at:
            workers.pop().wait_for_end(seconds)
            time.sleep(ABSENT_SECONDS)
            late = start(job.workers)
            begin([late], _START_SECONDS)
            workers.append(late)
        return [worker.hear(seconds) for worker in workers]


def job_of(contender: str, inner: str, rate: float, workers: int, seed: int, samples: int) -> Job:
    """Return a job of full length without pace."""
    steps = samples // (TASKS[TASK].batch_size * workers)
    return Job(TASK, contender, inner, rate, workers, seed, samples, steps)

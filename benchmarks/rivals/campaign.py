"""Tuning without a network, then each cell: seconds until the model is as good as the target says."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.campaign.journal import Journal
from benchmarks.campaign.search import search
from benchmarks.campaign.tasks import TASKS
from benchmarks.network.lab import Lab
from benchmarks.rivals.cells import (
    ABSENT_SECONDS,
    PACES,
    SLOWNESS,
    SMOKE_CONTENDERS,
    SMOKE_OPTIMIZER,
    SMOKE_RATE,
    TASK,
    Cell,
    job_of,
    train,
)
from benchmarks.rivals.contenders import CONTENDERS, DENSE_STEPS, INNERS, PERIOD, Contender
from benchmarks.rivals.worker import Job, Told

_SEARCH_SEED, _SEED = 100, 0
_TIMED_STEPS = DENSE_STEPS + 2 * PERIOD
"""Steps of a rival in a cell: its trajectory does not depend on the network, its time of a step does."""

Train = Callable[[Job, Lab | None], list[Told]]


class Measured(NamedTuple):
    """A contender in a cell.

    Attributes:
        curve: seconds and test loss of the first worker's model.
        step_seconds: mean time in which as many steps are made as there are workers.
        up: bytes that leave a worker's card in a step, headers included.
        down: bytes that come to it.
    """

    curve: list[tuple[float, float]]
    step_seconds: float
    up: float
    down: float


class Campaign:
    """All contenders in some cells.

    Attributes:
        measured: by cell and key of the contender.
        finals: test loss at the end without a network, by number of workers and key.
        chosen: optimizer and effective rate, likewise.
        unhindered: seconds of a step of DDP at the pace and without a network, by number of workers.
    """

    def __init__(self, journal: Journal, samples: int, do: Train = train, smoke: bool = False) -> None:
        self._journal = journal
        self.measured: dict[tuple[Cell, str], Measured] = {}
        self.finals: dict[tuple[int, str], float] = {}
        self.chosen: dict[tuple[int, str], tuple[str, float]] = {}
        self.unhindered: dict[int, float] = {}
        self.samples, self._smoke = samples, smoke
        self._do = do

    def run(self, cells: Sequence[Cell], after: Callable[[], object] = lambda: None) -> None:
        """Do everything, a cell at a time; ``after`` each one its results are there."""
        for cell in cells:
            for contender in (CONTENDERS[key] for key in (SMOKE_CONTENDERS if self._smoke else CONTENDERS)):
                self._measure(cell, contender)
            after()

    def _measure(self, cell: Cell, contender: Contender) -> None:
        inner, rate = self._tune(contender, cell.workers)
        if not rate:
            return
        job = job_of(contender.key, inner, rate, cell.workers, _SEED, self.samples)
        alone = self._train(job, None)
        if alone is None:
            return
        self.finals[cell.workers, contender.key] = alone[0].final
        paced = self._in_cell(job, cell, contender)
        if paced is None or (told := self._train(paced, cell)) is None:
            return
        trains = bool(contender.method or paced.lost_at)
        first = 0 if trains else DENSE_STEPS
        counted = told[:1] if paced.lost_at else told  # of a worker that came late the clock began late
        steps = sum(len(each.moments) - first for each in counted)
        spent = [(each.moments[first - 1] if first else (0.0, 0, 0), each.moments[-1]) for each in counted]
        seconds, up, down = ([after[n] - before[n] for before, after in spent] for n in range(3))
        curve = told[0].curve if trains else _timed(alone[0], told[0].moments)
        self.measured[cell, contender.key] = Measured(
            [(moment, loss) for _, moment, loss in curve],
            max(seconds) / job.all_steps if paced.lost_at else max(seconds) / steps * cell.workers,
            sum(up) / steps,
            sum(down) / steps,
        )

    def _in_cell(self, job: Job, cell: Cell, contender: Contender) -> Job | None:
        """Return what is done in a cell; ``None`` where a run that it depends on failed, or is not there."""
        paced = replace(job, pace=PACES[cell.workers], slowness=SLOWNESS if cell.scenario == "slow" else 1.0)
        is_rival = not contender.method
        if cell.scenario == "lost":
            paced = replace(paced, lost_at=job.all_steps // 2)
            if is_rival:
                equal = cell._replace(scenario="equal")
                if (equal, contender.key) not in self.measured:
                    self._measure(equal, contender)
                found = self.measured.get((equal, contender.key))
                return None if found is None else replace(paced, back_at=_back_at(paced, found.step_seconds))
        elif is_rival:
            paced = replace(paced, steps=min(paced.steps, _TIMED_STEPS))
            if contender.key == "ddp" and (free := self._train(replace(paced, slowness=1.0), None)):
                self.unhindered[cell.workers] = _usual_seconds(free[0].moments)
        return paced

    def _tune(self, contender: Contender, workers: int) -> tuple[str, float]:
        """Return the optimizer and the rate with the least validation loss; rate 0 where every run failed."""
        if self._smoke:
            return "" if contender.method else SMOKE_OPTIMIZER, SMOKE_RATE
        if contender.tuned_as:
            return self._tune(CONTENDERS[contender.tuned_as], workers)
        key = workers, contender.key
        if key not in self.chosen:
            inners = [""] if contender.method else list(INNERS)
            if not contender.method and contender.key != "ddp":
                inners = [self._tune(CONTENDERS["ddp"], workers)[0]]
            tried = [(self._search(contender, inner, workers), inner) for inner in inners]
            (loss, rate), inner = min(tried)
            self.chosen[key] = inner, rate if math.isfinite(loss) else 0.0
        return self.chosen[key]

    def _search(self, contender: Contender, inner: str, workers: int) -> tuple[float, float]:
        found: dict[float, float] = {}

        def trial(rate: float, momentum: float) -> float | None:
            job = job_of(contender.key, inner, rate, workers, _SEARCH_SEED, self.samples)
            told = self._train(replace(job, validation=True), None)
            found[rate] = math.inf if told is None or math.isnan(told[0].final) else told[0].final
            return found[rate]

        rate = search(trial, TASKS[TASK].rates, (0.0,)).rate
        return found[rate], rate

    def _train(self, job: Job, cell: Cell | None) -> list[Told] | None:
        """Do a run, or take it from the journal; ``None`` if it failed, or nothing is to be run."""

        def train() -> dict[str, Any]:
            with nullcontext() if cell is None else cell.network() as network:
                return {"told": [asdict(each) for each in self._do(job, network)]}

        place = f"{cell.words}, {cell.workers} workers" if cell else f"{job.workers} workers without a network"
        words = f"{place}: {CONTENDERS[job.contender].title}, {job.inner or 'rate'} {job.rate:g}"
        kept = self._journal.once(f"{asdict(job)} {cell}", words, 0.0, train)
        return None if kept is None else [Told(**each) for each in kept["told"]]


def time_to(target: float, curve: Sequence[tuple[float, float]]) -> float | None:
    """Return when a curve of (seconds, loss) first is at the target, between two points along a line."""
    if curve and curve[0][1] <= target:
        return curve[0][0]
    for (before, above), (after, below) in pairwise(curve):
        if below <= target < above:
            return before + (after - before) * (above - target) / (above - below)
    return None


def _timed(alone: Told, moments: Sequence[tuple[float, int, int]]) -> list[tuple[int, float, float]]:
    """Return a rival's curve with the times that its steps take on a network, of which the first ones were timed."""
    usual = _usual_seconds(moments)
    return [
        (steps, moments[min(steps, DENSE_STEPS) - 1][0] + usual * max(0, steps - DENSE_STEPS), loss)
        for steps, _, loss in alone.curve
    ]


def _back_at(job: Job, step_seconds: float) -> int:
    """Return the step before which the new worker joins a rival's others: where they average anyway."""
    return job.lost_at + PERIOD * math.ceil(ABSENT_SECONDS / step_seconds / PERIOD)


def _usual_seconds(moments: Sequence[tuple[float, int, int]]) -> float:
    return (moments[-1][0] - moments[DENSE_STEPS - 1][0]) / (len(moments) - DENSE_STEPS)


def best(values: Sequence[float | None]) -> float | None:
    """Return the least time, if there is one."""
    return min((value for value in values if value is not None), default=None)


def mean_bytes(measured: Sequence[Measured]) -> tuple[float, float]:
    """Return the mean bytes of a step, up and down."""
    return fmean(each.up for each in measured), fmean(each.down for each in measured)

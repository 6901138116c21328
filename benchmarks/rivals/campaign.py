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
    SEEDS,
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
from benchmarks.rivals.worker import Job, Moment, Told

_SEARCH_SEED = 100
_TIMED_STEPS = DENSE_STEPS + 2 * PERIOD
"""Steps of a rival in a cell: its trajectory does not depend on the network, its time of a step does."""

Train = Callable[[Job, Lab | None], list[Told]]


class Measured(NamedTuple):
    """A contender in a cell, with one seed.

    Attributes:
        curve: seconds and test loss of the first worker's model.
        step_seconds: mean time in which as many steps are made as there are workers.
        up: bytes that leave a worker's card in a step, headers included.
        down: bytes that come to it.
        gloo_seconds: of a rival's step: what it takes beyond the pace where there is no network, which is what all
            processes of gloo take of this machine's cores.
    """

    curve: list[tuple[float, float]]
    step_seconds: float
    up: float
    down: float
    gloo_seconds: float = 0.0


class Campaign:
    """All contenders in some cells.

    Args:
        journal: of the runs.
        samples: of all workers of a run together.
        seeds: of a cell.
        do: does a run.
        smoke: few contenders, and no search.
        keys: of the contenders that run.

    Attributes:
        measured: by cell and key of the contender, then by seed.
        finals: test loss at the end without a network, by number of workers and key, then by seed.
        chosen: optimizer and effective rate, by number of workers and key.
    """

    def __init__(
        self,
        journal: Journal,
        samples: int,
        seeds: Callable[[Cell], Sequence[int]] = lambda cell: SEEDS[:1],
        do: Train = train,
        smoke: bool = False,
        keys: Sequence[str] = tuple(CONTENDERS),
    ) -> None:
        self._journal = journal
        self.measured: dict[tuple[Cell, str], dict[int, Measured]] = {}
        self.finals: dict[tuple[int, str], dict[int, float]] = {}
        self.chosen: dict[tuple[int, str], tuple[str, float]] = {}
        self.samples, self._smoke = samples, smoke
        self._seeds, self._do = seeds, do
        self._keys = SMOKE_CONTENDERS if smoke else keys

    def run(self, cells: Sequence[Cell], after: Callable[[], object] = lambda: None) -> None:
        """Do everything, a seed and a cell at a time; ``after`` each one its results are there."""
        for seed in dict.fromkeys(seed for cell in cells for seed in self._seeds(cell)):
            for cell in (cell for cell in cells if seed in self._seeds(cell)):
                for contender in (CONTENDERS[key] for key in self._keys):
                    if not is_twin(contender, cell.workers):
                        self._measure(cell, contender, seed)
                after()

    def _measure(self, cell: Cell, contender: Contender, seed: int) -> None:
        inner, rate = self._tune(contender, cell.workers)
        if not rate:
            return
        job = job_of(contender.key, inner, rate, cell.workers, seed, self.samples)
        alone = self._train(job, None)
        if alone is None:
            return
        self.finals.setdefault((cell.workers, contender.key), {})[seed] = alone[0].final
        paced = self._in_cell(job, cell, contender)
        if paced is None or (told := self._train(paced, cell)) is None:
            return
        trains = bool(contender.method or paced.lost_at)
        counted = told[:1] if paced.lost_at else told  # of a worker that came late the clock began late
        begun = [Moment() if trains else each.begun for each in counted]
        spent = [(each.ended, before) for each, before in zip(counted, begun, strict=True)]
        seconds, up, down = ([after[n] - before[n] for after, before in spent] for n in range(3))
        steps = sum(each.steps - (0 if trains else DENSE_STEPS) for each in counted)
        curve = told[0].curve if trains else _timed(alone[0], told[0])
        gloo = 0.0
        if not trains and (free := self._train(paced, None)):
            gloo = max(0.0, free[0].usual_seconds - paced.pace * paced.slowness)
        self.measured.setdefault((cell, contender.key), {})[seed] = Measured(
            [(moment, loss) for _, moment, loss in curve],
            max(seconds) / job.all_steps if paced.lost_at else max(seconds) / steps * cell.workers,
            sum(up) / steps,
            sum(down) / steps,
            gloo,
        )

    def _in_cell(self, job: Job, cell: Cell, contender: Contender) -> Job | None:
        """Return what is done in a cell; ``None`` where a run that it depends on failed, or is not there."""
        paced = replace(job, pace=PACES[cell.workers], slowness=SLOWNESS if cell.scenario == "slow" else 1.0)
        is_rival = not contender.method
        if cell.scenario == "lost":
            paced = replace(paced, lost_at=job.all_steps // 2)
            if is_rival:
                equal = cell._replace(scenario="equal")
                if job.seed not in self.measured.get((equal, contender.key), {}):
                    self._measure(equal, contender, job.seed)
                found = self.measured.get((equal, contender.key), {}).get(job.seed)
                return None if found is None else replace(paced, back_at=_back_at(paced, found.step_seconds))
        elif is_rival:  # its time of a step does not depend on the seed
            paced = replace(paced, seed=SEEDS[0], steps=min(paced.steps, _TIMED_STEPS))
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
        return None if kept is None else [Told.read(each) for each in kept["told"]]


def time_to(target: float, curve: Sequence[tuple[float, float]]) -> float | None:
    """Return when a curve of (seconds, loss) first is at the target, between two points along a line."""
    if curve and curve[0][1] <= target:
        return curve[0][0]
    for (before, above), (after, below) in pairwise(curve):
        if below <= target < above:
            return before + (after - before) * (above - target) / (above - below)
    return None


def is_twin(contender: Contender, workers: int) -> bool:
    """Tell whether a contender before this one does the same with so many workers: 3 of 4 are all but one."""
    before = list(CONTENDERS.values())[: list(CONTENDERS).index(contender.key)]
    return bool(contender.method) and any(each.options(workers) == contender.options(workers) for each in before)


def _timed(alone: Told, timed: Told) -> list[tuple[int, float, float]]:
    """Return a rival's curve with the times that its steps take on a network, of which the first ones were timed."""
    first, usual = timed.begun.seconds / DENSE_STEPS, timed.usual_seconds
    return [
        (steps, first * min(steps, DENSE_STEPS) + usual * max(0, steps - DENSE_STEPS), loss)
        for steps, _, loss in alone.curve
    ]


def _back_at(job: Job, step_seconds: float) -> int:
    """Return the step before which the new worker joins a rival's others: where they average anyway."""
    return job.lost_at + PERIOD * math.ceil(ABSENT_SECONDS / step_seconds / PERIOD)


def mean_bytes(measured: Sequence[Measured]) -> tuple[float, float]:
    """Return the mean bytes of a step, up and down."""
    return fmean(each.up for each in measured), fmean(each.down for each in measured)

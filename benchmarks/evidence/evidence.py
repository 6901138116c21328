"""Tuning and runs, stage by stage; what is in the journal is not done again."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from benchmarks.compare.campaign import Runner
from benchmarks.compare.methods import METHODS
from benchmarks.compare.search import Choice, search
from benchmarks.compare.spec import Run, Spec
from benchmarks.compare.statistics import Difference, compare
from benchmarks.compare.tasks import TASKS
from benchmarks.evidence.stages import FORMS, Entrant, Stage

POINTS = 8
_SEARCH_SEED = 100
_HOPELESS_ERRORS, _HOPELESS_SHARE = 3.0, 0.02  # behind the dense twin in the simulator: both, the latter of its score
_MOMENTA = 2  # that are tried of a method's


class Cell(NamedTuple):
    """Where runs are compared."""

    task: str
    simulated: bool
    workers: int

    @classmethod
    def of(cls, stage: Stage) -> "Cell":
        return cls(stage.task, stage.simulated, stage.workers)


Runs = Mapping[tuple[Cell, Entrant], Mapping[int, Run]]


class Evidence(Runner):
    """All runs of some stages.

    Attributes:
        stages: what was to be done.
        runs: those that count, by cell, entrant and seed.
        left_out: real runs that the simulator says are not worth their hours, in words.
    """

    runs: dict[tuple[Cell, Entrant], dict[int, Run]]
    left_out: list[str]
    stages: Sequence[Stage]

    def run(self, stages: Sequence[Stage], after: Callable[[], None] = lambda: None) -> None:
        """Do everything; ``after`` each stage its results are there."""
        self.runs, self.left_out, self.stages = {}, [], stages
        self._choices: dict[tuple[str, int, int, Entrant], Choice] = {}
        self._watcher.plan(sum(map(_expected_seconds, stages)))
        for stage in stages:
            entrants = [entrant for entrant in stage.entrants if self._is_worth(stage, entrant)]
            for entrant in entrants:
                self._tune(stage, entrant)
            for seed in stage.seeds:
                for entrant in entrants:
                    run = self.once(_spec(stage, entrant, seed, self._tune(stage, entrant)))
                    if run is not None:
                        self.runs.setdefault((Cell.of(stage), entrant), {})[seed] = run
            after()

    def _tune(self, stage: Stage, entrant: Entrant) -> Choice:
        """Search rate and momentum at full length; a real run takes what the simulator found on the same task."""
        if stage.rate is not None:
            return Choice(stage.rate, _momenta(stage, entrant)[0])
        key = stage.task, stage.workers, stage.samples, entrant

        def trial(rate: float, momentum: float) -> float | None:
            run = self.once(_spec(stage, entrant, _SEARCH_SEED, Choice(rate, momentum), validation=True))
            return None if run is None else run.outcome.loss

        if key not in self._choices:
            self._choices[key] = search(trial, TASKS[stage.task].rates, _momenta(stage, entrant))
        return self._choices[key]

    def _is_worth(self, stage: Stage, entrant: Entrant) -> bool:
        small = Cell(f"{stage.task.removesuffix('-tiny')}-tiny", True, stage.workers)
        found = None if stage.simulated else difference(self.runs, small, entrant, entrant.twin)
        if found is None or found.mean is None or found.error is None or entrant.twin is None:
            return True
        score = fmean(run.outcome.score or 0.0 for run in self.runs[small, entrant.twin].values())
        if found.mean >= -max(_HOPELESS_ERRORS * found.error, _HOPELESS_SHARE * score):
            return True
        title = f"{METHODS[entrant.method].title}, {entrant.form}"
        self.left_out.append(f"{TASKS[stage.task].title}, {stage.workers} workers: {title}")
        return False


def difference(runs: Runs, cell: Cell, entrant: Entrant, rival: Entrant | None) -> Difference | None:
    """By how much an entrant is better than a rival, seed by seed; none where one has not run."""
    if rival is None or (cell, entrant) not in runs or (cell, rival) not in runs:
        return None
    ours, theirs = ({seed: run.outcome.score for seed, run in runs[cell, each].items()} for each in (entrant, rival))
    return compare(ours, theirs, higher_is_better=TASKS[cell.task].higher_is_better)


def _spec(stage: Stage, entrant: Entrant, seed: int, choice: Choice, validation: bool = False) -> Spec:
    return Spec(
        stage.task,
        entrant.method,
        stage.workers,
        seed,
        stage.samples,
        *choice,
        FORMS[entrant.form],
        validation,
        stage.pace,
        stage.simulated,
        0 if validation else POINTS,
    )


def _momenta(stage: Stage, entrant: Entrant) -> tuple[float, ...]:
    momenta = sorted(METHODS[entrant.method].momenta)
    return tuple(momenta[: _MOMENTA if stage.momenta else 1])


def _expected_seconds(stage: Stage) -> float:
    runs = [
        len(TASKS[stage.task].rates) + len(_momenta(stage, entrant)) - 1 + len(stage.seeds)
        for entrant in stage.entrants
    ]
    return sum(runs) * _spec(stage, stage.entrants[0], 0, Choice(1.0, 0.0)).expected_seconds

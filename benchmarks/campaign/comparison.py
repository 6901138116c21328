"""Methods on tasks: tuned alike, run with the same seeds, paired; stage by stage."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from benchmarks.campaign.execute import execute
from benchmarks.campaign.journal import Journal
from benchmarks.campaign.methods import METHODS
from benchmarks.campaign.search import Choice, search
from benchmarks.campaign.spec import Form, Outcome, Run, Spec
from benchmarks.campaign.statistics import Difference, compare
from benchmarks.campaign.tasks import TASKS

SEARCH_SEED = 100
"""Of the runs of a search: another than those of the runs that count."""
_HOPELESS_ERRORS, _HOPELESS_SHARE = 3.0, 0.02  # behind the dense twin in the simulator: both, the latter of its score

_AHEAD = ("dgs_ahead", "dgc_ahead", "dropping_ahead")
_TWINS = dict.fromkeys(("dgs", "dgc", "gradient_dropping", *_AHEAD), "asgd") | {"outer_sparse": "outer"}


class Entrant(NamedTuple):
    """A method, and the name of its form."""

    method: str
    form: str

    @property
    def twin(self) -> "Entrant | None":
        """The same method without sparseness; none for a dense one."""
        return None if self.form == "dense" else Entrant(_TWINS.get(self.method, self.method), "dense")


ASGD = Entrant("asgd", "dense")


@dataclass(frozen=True, slots=True)
class Stage:
    """Some methods on one task with one number of workers.

    Attributes:
        forms: what the entrants send, by the name of the form.
        samples: of all workers together.
        simulated: see :class:`~benchmarks.campaign.spec.Spec`.
        momenta: how many of a method's are tried.
        rate: effective learning rate of all runs; ``None`` to search one for each.
        tuned_at: workers of the runs of the search; 0 for as many as here.
        search_samples: likewise their samples.
        points: how often the first worker's model is measured on the way.
        is_paced: a worker's step lasts as long as the machine needs for a step of every worker.
    """

    task: str
    workers: int
    entrants: tuple[Entrant, ...]
    forms: Mapping[str, Form]
    samples: int
    simulated: bool
    momenta: int = 2
    seeds: tuple[int, ...] = (0, 1, 2)
    rate: float | None = None
    tuned_at: int = 0
    search_samples: int = 0
    points: int = 0
    is_paced: bool = True

    @property
    def pace(self) -> float:
        """Seconds that a step lasts at least; a worker that is alone waits for none."""
        task = TASKS[self.task]
        if self.simulated or self.workers == 1 or not self.is_paced:
            return 0.0
        return self.workers * task.batch_size * task.expected_seconds / 1000

    def momenta_of(self, entrant: Entrant) -> tuple[float, ...]:
        """Return those that are tried."""
        return tuple(sorted(METHODS[entrant.method].momenta)[: self.momenta])

    def searched_at(self, entrant: Entrant) -> int:
        """Return with how many workers an entrant is tuned."""
        return 1 if METHODS[entrant.method].kind == "single" else self.tuned_at or self.workers

    def spec(self, entrant: Entrant, seed: int, choice: Choice) -> Spec:
        """Return a run that counts."""
        form = self.forms[entrant.form]
        return Spec(
            self.task,
            entrant.method,
            self.workers,
            seed,
            self.samples,
            *choice,
            form,
            pace=self.pace,
            simulated=self.simulated,
            points=self.points,
        )

    def trial(self, entrant: Entrant, choice: Choice) -> Spec:
        """Return a run of the search."""
        workers, samples = self.searched_at(entrant), self.search_samples or self.samples
        form, pace = self.forms[entrant.form], self.pace if workers == self.workers else 0.0
        return Spec(
            self.task,
            entrant.method,
            workers,
            SEARCH_SEED,
            samples,
            *choice,
            form,
            validation=True,
            pace=pace,
            simulated=self.simulated,
        )


class Cell(NamedTuple):
    """Where runs are compared."""

    task: str
    simulated: bool
    workers: int

    @classmethod
    def of(cls, stage: Stage) -> "Cell":
        return cls(stage.task, stage.simulated, stage.workers)


Runs = Mapping[tuple[Cell, Entrant], Mapping[int, Run]]
_Tuned = tuple[str, int, int, Entrant]


class Comparison:
    """All runs of some stages.

    Args:
        journal: what was done before.
        do: does one run.

    Attributes:
        stages: what was to be done.
        runs: those that count, by cell, entrant and seed.
        searched: those of the search.
        choices: what each (task, tuned number of workers, samples of the search, entrant) is run with.
        left_out: real runs that the simulator says are not worth their hours, in words.
    """

    def __init__(self, journal: Journal, do: Callable[[Spec], Outcome] = execute) -> None:
        self.journal = journal
        self.stages: Sequence[Stage] = ()
        self.runs: dict[tuple[Cell, Entrant], dict[int, Run]] = {}
        self.searched: list[Run] = []
        self.choices: dict[_Tuned, Choice] = {}
        self.left_out: list[str] = []
        self._do = do

    @property
    def counted(self) -> list[Run]:
        """Every run that counts."""
        return [run for seeds in self.runs.values() for run in seeds.values()]

    def run(self, stages: Sequence[Stage], after: Callable[[], object] = lambda: None) -> None:
        """Do everything; ``after`` each stage its results are there."""
        self.stages = stages
        self.journal.watcher.plan(sum(_expected_seconds(stages)))
        for stage in stages:
            entrants = [entrant for entrant in stage.entrants if self._is_worth(stage, entrant)]
            for entrant in entrants:
                self._tune(stage, entrant)
            for seed in stage.seeds:
                for entrant in entrants:
                    run = self._run(stage.spec(entrant, seed, self._tune(stage, entrant)))
                    if run is not None:
                        self.runs.setdefault((Cell.of(stage), entrant), {})[seed] = run
            after()

    def _run(self, spec: Spec) -> Run | None:
        kept = self.journal.once(
            spec.key, _words(spec), spec.expected_seconds, lambda: Run(spec, self._do(spec)).plain()
        )
        return None if kept is None else Run.of(kept)

    def _tune(self, stage: Stage, entrant: Entrant) -> Choice:
        """Search rate and momentum; a real run takes what the simulator found on the same task."""
        if stage.rate is not None:
            return Choice(stage.rate, stage.momenta_of(entrant)[0])

        def trial(rate: float, momentum: float) -> float | None:
            run = self._run(stage.trial(entrant, Choice(rate, momentum)))
            if run is None:
                return None
            self.searched.append(run)
            return run.outcome.loss

        key = _tuned(stage, entrant)
        if key not in self.choices:
            self.choices[key] = search(trial, TASKS[stage.task].rates, stage.momenta_of(entrant))
        return self.choices[key]

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
    """By how much an entrant is better than a rival, seed by seed; none if one has not run."""
    if rival is None or (cell, entrant) not in runs or (cell, rival) not in runs:
        return None
    ours, theirs = ({seed: run.outcome.score for seed, run in runs[cell, each].items()} for each in (entrant, rival))
    return compare(ours, theirs, higher_is_better=TASKS[cell.task].higher_is_better)


def _tuned(stage: Stage, entrant: Entrant) -> _Tuned:
    return stage.task, stage.searched_at(entrant), stage.search_samples or stage.samples, entrant


def _expected_seconds(stages: Sequence[Stage]) -> Iterator[float]:
    """Yield what runs take; a search is taken to need no rate beyond those that it begins with."""
    known: set[_Tuned] = set()
    for stage in stages:
        for entrant in stage.entrants:
            yield len(stage.seeds) * stage.spec(entrant, 0, Choice(1.0, 0.0)).expected_seconds
            if stage.rate is None and (key := _tuned(stage, entrant)) not in known:
                known.add(key)
                trials = len(TASKS[stage.task].rates) + len(stage.momenta_of(entrant)) - 1
                yield trials * stage.trial(entrant, Choice(1.0, 0.0)).expected_seconds


def _words(spec: Spec) -> str:
    how = "simulated, " if spec.simulated else ""
    form = f"{spec.form.density:.0%} in {spec.form.values}"
    if spec.form.budget:
        form = f"{spec.form.budget:.1%} of the bytes"
        form += f", replies {spec.form.reply_budget:.1%}" if spec.form.reply_budget else ""
    form += f", residuals in {spec.form.residuals}" if spec.form.residuals != "fp32" else ""
    what = "search" if spec.validation else f"seed {spec.seed}"
    workers = "one worker" if spec.workers == 1 else f"{spec.workers} workers"
    return (
        f"{how}{TASKS[spec.task].title}: {METHODS[spec.method].title}, {form}, {workers}, {what}, "
        f"rate {spec.rate:.3g}, momentum {spec.momentum:g}"
    )

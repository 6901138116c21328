"""The order of the work: search, then train with what was found; what is in the ledger is not done again."""

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from benchmarks.compare.execute import execute
from benchmarks.compare.ledger import Ledger
from benchmarks.compare.methods import METHODS
from benchmarks.compare.plan import Plan
from benchmarks.compare.processes import ChildFailedError
from benchmarks.compare.search import Choice, search
from benchmarks.compare.spec import Form, Outcome, Run, Spec
from benchmarks.compare.tasks import TASKS
from psclient.errors import SparsepsError


class Watcher(Protocol):
    """Is told how far it is, in expected seconds of work."""

    def plan(self, expected_seconds: float) -> None:
        """Expect more work."""

    def begin(self, what: str) -> None:
        """See something begin."""

    def done(self, expected_seconds: float, seconds: float | None) -> None:
        """See something end; ``None`` seconds where it was done before."""


class Runner:
    """Does runs, each once.

    Args:
        ledger: what was done before.
        watcher: is told.
        do: does one run; ``None`` for what was done before alone.

    Attributes:
        failures: what went wrong, in words; a further call of the program tries it again.
    """

    def __init__(self, ledger: Ledger, watcher: Watcher, do: Callable[[Spec], Outcome] | None = execute) -> None:
        self.failures: list[str] = []
        self._ledger, self._watcher, self._do = ledger, watcher, do

    def once(self, spec: Spec) -> Run | None:
        """Do a run, or take it from the ledger; ``None`` where it failed."""
        kept = self._ledger.get(spec.key)
        if kept is not None:
            self._watcher.done(spec.expected_seconds, None)
            return Run.of(kept)
        if self._do is None:
            return None
        self._watcher.begin(_words(spec))
        started = time.monotonic()
        try:
            run = Run(spec, self._do(spec))
        except (ChildFailedError, SparsepsError) as error:
            self.failures.append(f"{_words(spec)}: {error}")
            return None
        finally:
            self._watcher.done(spec.expected_seconds, time.monotonic() - started)
        self._ledger.keep(spec.key, run.plain())
        return run


class Campaign(Runner):
    """All runs of one comparison of a plan's.

    Attributes:
        runs: those that count.
        searched: those of the search.
        choices: what each (task, method, tuned number of workers) is run with.
    """

    def __init__(self, plan: Plan, ledger: Ledger, watcher: Watcher, do: Callable[[Spec], Outcome] = execute) -> None:
        super().__init__(ledger, watcher, do)
        self.plan = plan
        self.runs: list[Run] = []
        self.searched: list[Run] = []
        self.choices: dict[tuple[str, str, int], Choice] = {}

    def run(self) -> None:
        """Do everything, a task and a number of workers at a time: the runs that are paired lie close together."""
        self._watcher.plan(self._expected_seconds())
        for task in self.plan.tasks:
            for workers in sorted({1, *self.plan.workers}):
                entrants = [key for key in self.plan.methods if workers in self.plan.workers_of(METHODS[key])]
                for key in entrants:
                    self._tune(task, key, self.plan.tuned_for(METHODS[key], workers))
                for seed in self.plan.seeds:
                    for key in entrants:
                        if (run := self.once(self._final(task, key, workers, seed))) is not None:
                            self.runs.append(run)

    def _final(self, task: str, method: str, workers: int, seed: int) -> Spec:
        choice = self.choices[task, method, self.plan.tuned_for(METHODS[method], workers)]
        return Spec(task, method, workers, seed, self.plan.samples, *choice, Form(self.plan.density))

    def _tune(self, task: str, method: str, workers: int) -> None:
        if (task, method, workers) in self.choices:
            return

        def trial(rate: float, momentum: float) -> float | None:
            plan = self.plan
            run = self.once(
                Spec(
                    task,
                    method,
                    workers,
                    plan.search_seed,
                    plan.search_samples,
                    rate,
                    momentum,
                    Form(plan.density),
                    validation=True,
                )
            )
            if run is None:
                return None
            self.searched.append(run)
            return run.outcome.loss

        momenta = self.plan.momenta_of(METHODS[method])
        self.choices[task, method, workers] = search(trial, TASKS[task].rates, momenta)

    def _expected_seconds(self) -> float:
        """Add up the runs; a search is taken to need no rate beyond those that it begins with."""
        return sum(self._expected_costs())

    def _expected_costs(self) -> Iterator[float]:
        plan = self.plan
        for task in plan.tasks:
            for method in (METHODS[key] for key in plan.methods):
                counts = plan.workers_of(method)
                cost = TASKS[task].expected_seconds / 1000
                trials = len(TASKS[task].rates) + len(plan.momenta_of(method)) - 1
                yield cost * plan.search_samples * trials * len({plan.tuned_for(method, count) for count in counts})
                yield cost * plan.samples * len(plan.seeds) * len(counts)


def _words(spec: Spec) -> str:
    how = "simulated, " if spec.simulated else ""
    form = f"{spec.form.density:.0%} in {spec.form.values}"
    if spec.form.budget:
        form = f"{spec.form.budget:.0%} of the bytes"
    what = "search" if spec.validation else f"seed {spec.seed}"
    workers = "one worker" if spec.workers == 1 else f"{spec.workers} workers"
    return (
        f"{how}{TASKS[spec.task].title}: {METHODS[spec.method].title}, {form}, {workers}, {what}, "
        f"rate {spec.rate:.3g}, momentum {spec.momentum:g}"
    )

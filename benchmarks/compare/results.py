"""What came out, gathered for tables, figures and JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.campaign.methods import METHODS, SUBJECT
from benchmarks.campaign.search import Choice
from benchmarks.campaign.spec import Run
from benchmarks.campaign.statistics import Difference, Spread, compare, spread
from benchmarks.campaign.tasks import TASKS


@dataclass(frozen=True, slots=True)
class Entry:
    """One method with so many workers on one task, over all seeds.

    Attributes:
        scores: of the seeds that did not diverge; ``None`` where all did.
        diverged: how many did.
        choice: rate and momentum that it was run with.
        up_bytes: means over the seeds, as are all below.
    """

    task: str
    method: str
    workers: int
    scores: Spread | None
    losses: Spread | None
    diverged: int
    choice: Choice
    up_bytes: float
    down_bytes: float
    versions: float
    mean_staleness: float
    p99_staleness: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Pairing:
    """The subject against one rival."""

    task: str
    rival: str
    workers: int
    difference: Difference


def entries(runs: Sequence[Run]) -> list[Entry]:
    """Gather the runs by task, number of workers and method, in that order."""
    groups: dict[tuple[str, int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.spec.task, run.spec.workers, run.spec.method), []).append(run)
    found = []
    for (task, workers, method), group in groups.items():
        outcomes = [run.outcome for run in group]
        scores = [outcome.score for outcome in outcomes if outcome.score is not None]
        losses = [outcome.loss for outcome in outcomes if outcome.loss is not None]
        found.append(
            Entry(
                task,
                method,
                workers,
                spread(scores) if scores else None,
                spread(losses) if losses else None,
                len(outcomes) - len(scores),
                Choice(group[0].spec.rate, group[0].spec.momentum),
                *(
                    fmean(getattr(outcome, name) for outcome in outcomes)
                    for name in ("up_bytes", "down_bytes", "versions", "mean_staleness", "p99_staleness", "seconds")
                ),
            )
        )
    return sorted(found, key=lambda entry: ([*TASKS].index(entry.task), entry.workers, [*METHODS].index(entry.method)))


def pairings(runs: Sequence[Run]) -> list[Pairing]:
    """Hold the subject against every rival that has a server, by task and number of workers."""
    scores: dict[tuple[str, int, str], dict[int, float | None]] = {}
    for run in runs:
        scores.setdefault((run.spec.task, run.spec.workers, run.spec.method), {})[run.spec.seed] = run.outcome.score
    found = []
    for (task, workers, method), theirs in scores.items():
        ours = scores.get((task, workers, SUBJECT))
        if method == SUBJECT or METHODS[method].kind == "single" or ours is None:
            continue
        difference = compare(ours, theirs, higher_is_better=TASKS[task].higher_is_better)
        if difference is not None:
            found.append(Pairing(task, method, workers, difference))
    return sorted(found, key=lambda each: ([*TASKS].index(each.task), each.workers, [*METHODS].index(each.rival)))

"""The journal as tables that a person reads in a minute, and what they answer."""

import functools
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from benchmarks.campaign.comparison import ASGD, Cell, Comparison, Entrant, Runs, difference
from benchmarks.campaign.methods import METHODS
from benchmarks.campaign.report import count_words, difference_words, metric_words, score_words
from benchmarks.campaign.report import markdown as as_markdown
from benchmarks.campaign.spec import Run
from benchmarks.campaign.statistics import spread
from benchmarks.campaign.tasks import TASKS
from benchmarks.harness.section import Table

_MOST_SHARE = 0.04  # a budget of 3 %, and the first replies, which are exact
_THAN = {"better": "better than", "equal": "equal to", "worse": "worse than"}


def markdown(facts: dict[str, Any], evidence: Comparison) -> str:
    """Return tables, answers, and what was run where."""
    found = [table for group in _groups(evidence.runs) for table in _tables(evidence.runs, *group)]
    return as_markdown(facts, found, [*answers(evidence.runs), *_notes(evidence)])


def answers(runs: Runs) -> list[str]:
    """Answer the main question for each cell: about 3 % of the bytes each way, against dense twins and dense ASGD."""
    said = []
    for cell in sorted({cell for cell, _ in runs}):
        verdicts = []
        for entrant in (entrant for here, entrant in runs if here == cell and entrant.form != "dense"):
            twin, asgd = (difference(runs, cell, entrant, rival) for rival in (entrant.twin, ASGD))
            if twin is not None and asgd is not None and max(_shares(runs[cell, entrant].values())) <= _MOST_SHARE:
                verdicts.append(f"{title_of(entrant)}: {twin.verdict} ({_THAN[asgd.verdict]} dense ASGD)")
        if verdicts:
            words = "; ".join(verdicts)
            said.append(
                f"{_place(cell)}, {count_words(cell.workers)}, about 3 % of the bytes, against the dense twin: {words}."
            )
    return said


def title_of(entrant: Entrant) -> str:
    return f"{METHODS[entrant.method].title}, {entrant.form}"


def _groups(runs: Runs) -> list[tuple[str, bool]]:
    return list(dict.fromkeys((cell.task, cell.simulated) for cell, _ in runs))


def _tables(runs: Runs, task: str, simulated: bool) -> list[Table]:
    here = {key: found for key, found in runs.items() if key[0].task == task and key[0].simulated == simulated}
    counts = sorted({cell.workers for cell, _ in here})
    heads = ("method", "up", "down", *(f"{count} worker{'s' if count > 1 else ''}" for count in counts))
    place = f"{_place(Cell(task, simulated, 0))}: {metric_words(TASKS[task])}"
    entrants = dict.fromkeys(entrant for _, entrant in here)

    def rows(*, against_asgd: bool) -> list[tuple[str, ...]]:
        found = []
        for entrant in entrants:
            rival = ASGD if against_asgd else entrant.twin
            if against_asgd and entrant == ASGD:
                continue
            cells = [_cell(here, Cell(task, simulated, count), entrant, rival) for count in counts]
            shares = [_shares(seeds.values()) for (_, each), seeds in here.items() if each == entrant]
            found.append((title_of(entrant), *map(_range, zip(*shares, strict=True)), *cells))
        return found

    return [
        Table(f"{place}; in brackets by how much better than the dense twin", heads, rows(against_asgd=False)),
        Table(f"{place}; in brackets by how much better than dense ASGD", heads, rows(against_asgd=True)),
    ]


def _cell(runs: Runs, cell: Cell, entrant: Entrant, rival: Entrant | None) -> str:
    if (cell, entrant) not in runs:
        return "–"
    scores = [run.outcome.score for run in runs[cell, entrant].values() if run.outcome.score is not None]
    words = score_words(TASKS[cell.task], spread(scores) if scores else None)
    found = difference(runs, cell, entrant, rival)
    return words if found is None else f"{words.split(' ±')[0]} ({difference_words(TASKS[cell.task], found)})"


def _shares(runs: Iterable[Run]) -> tuple[float, float]:
    """Return the bytes up and down as shares of those of a dense step of every worker."""
    found = [(run.outcome, 4 * _parameters(run.spec.task) * run.spec.steps * run.spec.workers) for run in runs]
    return (
        fmean(outcome.up_bytes / dense for outcome, dense in found),
        fmean(outcome.down_bytes / dense for outcome, dense in found),
    )


def _range(shares: Iterable[float]) -> str:
    """Write shares with several numbers of workers as one, where they are alike, or as a range."""
    words = [f"{share:.1%}" for share in sorted(shares)]
    return words[0] if words[0] == words[-1] else f"{words[0]} to {words[-1]}"


@functools.cache
def _parameters(task: str) -> int:
    return sum(parameter.numel() for parameter in TASKS[task].make_model().parameters())


def _notes(evidence: Comparison) -> list[str]:
    runs = evidence.counted
    tasks = dict.fromkeys(run.spec.task for run in runs)
    given = {stage.rate for stage in evidence.stages if stage.rate is not None}
    return [
        *(
            f"{TASKS[task].title}: {_parameters(task):,} parameters, "
            f"{', '.join(sorted({f'{run.spec.samples:,}' for run in runs if run.spec.task == task}))} samples a run, "
            f"batches of {TASKS[task].batch_size}. {TASKS[task].source()}"
            for task in tasks
        ),
        f"Answers are of the rows with at most {_MOST_SHARE:.0%} of the bytes each way.",
        *(f"No rate was searched: it is {rate:g} for all." for rate in given),
        *(
            "Rates are searched alike for every method, form and number of workers, by runs of full length with "
            "another seed, on data of their own."
            for _ in range(not given)
        ),
        "± is one paired standard error in brackets, one deviation over seeds elsewhere; "
        "better and worse are beyond one error. Up and down are shares of the bytes of a dense step of every worker.",
        "Simulated: one process is all workers, in random turns, beside a real server. Real: a process each; a step "
        "lasts as long as the machine needs for one step of all, so that its load makes no staleness.",
        *(
            f"Left out, as the simulator has them far behind their dense twins: {'; '.join(evidence.left_out)}."
            for _ in evidence.left_out[:1]
        ),
        *_missing(evidence),
        *(f"FAILED: {words}" for words in evidence.failures),
    ]


def _missing(evidence: Comparison) -> list[str]:
    """Say how much of what was to be run has run with every seed."""
    asked: dict[Cell, int] = {}
    done: dict[Cell, int] = {}
    for stage in evidence.stages:
        cell = Cell.of(stage)
        full = [len(evidence.runs.get((cell, each), ())) >= len(stage.seeds) for each in stage.entrants]
        asked[cell], done[cell] = asked.get(cell, 0) + len(full), done.get(cell, 0) + sum(full)
    words: dict[str, list[str]] = {}
    for cell, rows in sorted(asked.items()):
        if done[cell] < rows:
            words.setdefault(_place(cell), []).append(f"{done[cell]} of {rows} with {count_words(cell.workers)}")
    return [f"Rows that have run with every seed: {place}: {', '.join(counts)}." for place, counts in words.items()]


def _place(cell: Cell) -> str:
    return f"{TASKS[cell.task].title}, {'simulated' if cell.simulated else 'real'}"

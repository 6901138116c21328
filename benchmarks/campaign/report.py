"""What a comparison found: scores beside those of a rival, how each was reached, answers, and pictures."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter

from benchmarks.campaign.comparison import ASGD, Cell, Comparison, Entrant, Runs, difference
from benchmarks.campaign.methods import METHODS
from benchmarks.campaign.spec import Run
from benchmarks.campaign.statistics import Difference, Spread, spread
from benchmarks.campaign.tasks import TASKS, Task
from benchmarks.campaign.worker import LARGEST_NORM
from benchmarks.harness.plots import Plot, frame, legend, style_of
from benchmarks.harness.section import Section, Table

Rivals = Mapping[str, Callable[[Entrant], Entrant | None]]
"""Whom an entrant is compared with, by a name for readers."""

_MOST_SHARE = 0.04  # a budget of 3 %, and the first replies, which are exact
_THAN = {"better": "better than", "equal": "equal to", "worse": "worse than"}


def section(key: str, title: str, made: Comparison, rivals: Rivals) -> Section:
    """Return tables, answers, and what was run where."""
    groups = list(dict.fromkeys((cell.task, cell.simulated) for cell, _ in made.runs))
    found = Section(key, title)
    for group in groups:
        found.tables += [_scores(made.runs, *group, name, rival) for name, rival in rivals.items()]
    found.tables += [_details(made.runs, *group) for group in groups]
    if groups:
        found.plots.append(_over_workers(key, groups, made.runs))
    cells = dict.fromkeys(cell for cell, _ in made.runs)
    found.plots += [_curves(key, cell, made.runs) for cell in cells if _has_curves(cell, made.runs)]
    found.notes = [*answers(made.runs), *_notes(made)]
    found.figures = {
        "choices": [[*map(str, tuned), choice] for tuned, choice in made.choices.items()],
        "runs": [run.plain() for run in made.counted],
        "search_runs": [run.plain() for run in made.searched],
        "failures": made.journal.failures,
    }
    return found


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
            said.append(
                f"{_place(cell.task, cell.simulated)}, {_count(cell.workers)}, about 3 % of the bytes, against the "
                f"dense twin: {'; '.join(verdicts)}."
            )
    return said


def title_of(entrant: Entrant) -> str:
    """Name an entrant for readers."""
    return ", ".join(filter(None, (METHODS[entrant.method].title, entrant.form)))


def _scores(runs: Runs, task: str, simulated: bool, name: str, rival_of: Callable[[Entrant], Entrant | None]) -> Table:
    here = {key: found for key, found in runs.items() if key[0].task == task and key[0].simulated == simulated}
    counts = sorted({cell.workers for cell, _ in here})
    rows = []
    for entrant in dict.fromkeys(entrant for _, entrant in here):
        cells = [_cell(here, Cell(task, simulated, count), entrant, rival_of(entrant)) for count in counts]
        shares = [_shares(seeds.values()) for (_, each), seeds in here.items() if each == entrant]
        rows.append((title_of(entrant), *map(_range, zip(*shares, strict=True)), *cells))
    heads = ("method", "up", "down", *map(_count, counts))
    title = f"{_place(task, simulated)}: {_metric(TASKS[task])}; in brackets by how much better than {name}"
    return Table(title, heads, rows)


def _cell(runs: Runs, cell: Cell, entrant: Entrant, rival: Entrant | None) -> str:
    if (cell, entrant) not in runs:
        return "–"
    words, task = _spread_words(runs[cell, entrant].values()), TASKS[cell.task]
    found = None if rival == entrant else difference(runs, cell, entrant, rival)
    return words if found is None else f"{words.split(' ±')[0]} ({_difference_words(task, found)})"


def _details(runs: Runs, task: str, simulated: bool) -> Table:
    """Show with what each score was reached: means over the seeds."""
    rows = []
    for (cell, entrant), seeds in runs.items():
        if (cell.task, cell.simulated) == (task, simulated):
            found = [run.outcome for run in seeds.values()]
            spec = next(iter(seeds.values())).spec
            rows.append(
                (
                    title_of(entrant),
                    str(cell.workers),
                    _spread_words(seeds.values()),
                    f"{spec.rate:.2g}",
                    f"{spec.momentum:g}",
                    f"{fmean(each.up_bytes for each in found) / 1e6:.1f}",
                    f"{fmean(each.down_bytes for each in found) / 1e6:.1f}",
                    f"{fmean(each.versions for each in found):.0f}",
                    f"{fmean(each.mean_staleness for each in found):.1f}",
                    f"{fmean(each.p99_staleness for each in found):.0f}",
                    f"{fmean(each.seconds for each in found):.1f}",
                )
            )
    heads = ("method", "workers", _metric(TASKS[task]), "rate", "momentum", "up, MB", "down, MB", "versions")
    return Table(f"{_place(task, simulated)}: settings and costs", (*heads, "staleness, mean", "p99", "seconds"), rows)


def _shares(runs: Iterable[Run]) -> tuple[float, float]:
    """Return the bytes up and down as shares of those of a dense step of every worker."""
    found = [(run.outcome, 4 * _parameters(run.spec.task) * run.spec.steps * run.spec.workers) for run in runs]
    return (
        fmean(outcome.up_bytes / dense for outcome, dense in found),
        fmean(outcome.down_bytes / dense for outcome, dense in found),
    )


def _range(shares: Iterable[float]) -> str:
    """Write shares with several numbers of workers as one if they are alike, or as a range."""
    words = [f"{share:.1%}" for share in sorted(shares)]
    return words[0] if words[0] == words[-1] else f"{words[0]} to {words[-1]}"


@functools.cache
def _parameters(task: str) -> int:
    return sum(parameter.numel() for parameter in TASKS[task].make_model().parameters())


def _notes(made: Comparison) -> list[str]:
    runs = made.counted
    given = {stage.rate for stage in made.stages if stage.rate is not None}
    searched = sorted({stage.search_samples or stage.samples for stage in made.stages})
    left_out = "; ".join(made.left_out)
    return [
        *(
            f"{TASKS[task].title}: {_parameters(task):,} parameters, "
            f"{', '.join(sorted({f'{run.spec.samples:,}' for run in runs if run.spec.task == task}))} samples a run, "
            f"batches of {TASKS[task].batch_size}. {TASKS[task].source()}"
            for task in dict.fromkeys(run.spec.task for run in runs)
        ),
        "A seed gives every method the same weights to begin with and every worker the same batches; gradients are "
        f"clipped to a norm of {LARGEST_NORM:g}. ± is one paired standard error in brackets, one deviation over seeds "
        "elsewhere; better and worse are beyond one error.",
        *(f"No rate was searched: it is {rate:g} for all." for rate in given),
        *(
            "Rates are searched alike for every method, form and number of workers, by runs of "
            f"{', '.join(f'{samples:,}' for samples in searched)} samples with another seed, on data of their own."
            for _ in range(not given)
        ),
        "Bytes are messages of pushes and pulls of all workers, without the first upload and downloads; up and down "
        f"are shares of those of dense steps. Answers are of the rows with at most {_MOST_SHARE:.0%} each way.",
        "Simulated: one process is all workers, in random turns, beside a real server. Real: a process each.",
        *(f"Left out, as the simulator has them far behind their dense twins: {left_out}." for _ in made.left_out[:1]),
        *_missing(made),
    ]


def _missing(made: Comparison) -> list[str]:
    """Say how much of what was to be run has run with every seed."""
    asked: dict[Cell, int] = {}
    done: dict[Cell, int] = {}
    for stage in made.stages:
        cell = Cell.of(stage)
        full = [len(made.runs.get((cell, each), ())) >= len(stage.seeds) for each in stage.entrants]
        asked[cell], done[cell] = asked.get(cell, 0) + len(full), done.get(cell, 0) + sum(full)
    words: dict[str, list[str]] = {}
    for cell, rows in sorted(asked.items()):
        if done[cell] < rows:
            place = _place(cell.task, cell.simulated)
            words.setdefault(place, []).append(f"{done[cell]} of {rows} with {_count(cell.workers)}")
    return [f"Rows that have run with every seed: {place}: {', '.join(counts)}." for place, counts in words.items()]


def _over_workers(key: str, groups: Sequence[tuple[str, bool]], runs: Runs) -> Plot:
    figure, planes = frame(len(groups))
    entrants = list(dict.fromkeys(entrant for _, entrant in runs))
    for (task, simulated), plane in zip(groups, planes, strict=True):
        counts: set[int] = set()
        for number, entrant in enumerate(entrants):
            found = {
                cell.workers: spread(scores)
                for (cell, each), seeds in runs.items()
                if each == entrant and (cell.task, cell.simulated) == (task, simulated)
                if (scores := _finite(seeds.values()))
            }
            counts |= found.keys()
            colour, marker = style_of(number)
            offset = 1 + 0.012 * (number - len(entrants) / 2)  # so that error bars do not hide one another
            plane.errorbar(
                [count * offset for count in sorted(found)],
                [found[count].mean for count in sorted(found)],
                yerr=[found[count].deviation for count in sorted(found)],
                label=title_of(entrant),
                color=colour,
                marker=marker,
                markersize=5,
                linewidth=1.2,
                linestyle="--" if entrant.form == "dense" else "-",
                capsize=2,
                elinewidth=0.8,
            )
        plane.set_xscale("log", base=2)
        plane.set_xticks(sorted(counts), labels=[str(count) for count in sorted(counts)])
        plane.xaxis.set_minor_formatter(NullFormatter())
        plane.set_xlabel("workers")
    _label(figure, [TASKS[task] for task, _ in groups])
    return Plot(f"{key}-workers", "Quality by workers", "Error bars: one deviation.", legend(figure, planes[0], 4))


def _curves(key: str, cell: Cell, runs: Runs) -> Plot:
    """Draw how good the first worker's model is after so many steps, and after so many bytes of all workers."""
    figure, planes = frame(2)
    here = [(entrant, seeds) for (place, entrant), seeds in runs.items() if place == cell]
    for number, (entrant, seeds) in enumerate(here):
        colour, marker = style_of(number)
        curves = [run.outcome.curve for run in seeds.values() if run.outcome.curve and run.outcome.score is not None]
        points = [[fmean(values) for values in zip(*same, strict=True)] for same in zip(*curves, strict=False)]
        for plane, x in zip(planes, ([p[0] for p in points], [(p[1] + p[2]) / 1e6 for p in points]), strict=True):
            plane.plot(
                x,
                [point[3] for point in points],
                label=title_of(entrant),
                color=colour,
                marker=marker,
                markersize=4,
                linewidth=1.2,
                linestyle="--" if entrant.form == "dense" else "-",
            )
    _label(figure, [TASKS[cell.task]] * 2)
    planes[0].set_xlabel(f"steps of each of {cell.workers} workers")
    planes[1].set_xlabel("MB both ways, all workers together")
    planes[1].set_xscale("log")
    kind = "simulated" if cell.simulated else "real"
    title = f"{_place(cell.task, cell.simulated)}, {_count(cell.workers)}"
    caption = "The first worker's model on the way; dashed: dense."
    return Plot(f"{key}-{cell.task}-{kind}-{cell.workers}", title, caption, legend(figure, planes[0], 3))


def _has_curves(cell: Cell, runs: Runs) -> bool:
    return any(run.outcome.curve for (place, _), seeds in runs.items() if place == cell for run in seeds.values())


def _label(figure: Figure, tasks: Sequence[Task]) -> None:
    """Name each place after its task, and its upright axis after the task's metric."""
    for plane, task in zip(figure.axes, tasks, strict=True):
        plane.set_title(task.title, fontsize=10)
        plane.set_ylabel("test accuracy" if task.higher_is_better else "test loss, nats a byte (lower is better)")
        if task.higher_is_better:
            plane.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))


def _place(task: str, simulated: bool) -> str:
    return f"{TASKS[task].title}, {'simulated' if simulated else 'real'}"


def _count(workers: int) -> str:
    return "one worker" if workers == 1 else f"{workers} workers"


def _metric(task: Task) -> str:
    return "test accuracy, %" if task.higher_is_better else "test loss, nats a byte"


def _finite(runs: Iterable[Run]) -> list[float]:
    return [run.outcome.score for run in runs if run.outcome.score is not None]


def _spread_words(runs: Iterable[Run]) -> str:
    """Write mean and deviation of the scores, and how many runs diverged."""
    runs = list(runs)
    scores, task = _finite(runs), TASKS[runs[0].spec.task]
    found = spread(scores) if scores else Spread(0.0, 0.0)
    words = f"{_number(task, found.mean)} ± {_number(task, found.deviation)}" if scores else "–"
    return words if len(scores) == len(runs) else f"{words} ({len(runs) - len(scores)} diverged)"


def _difference_words(task: Task, found: Difference) -> str:
    if found.mean is None:
        return f"diverged, {found.verdict}"
    sign = "+" if found.mean >= 0 else "−"
    error = "" if found.error is None else f" ± {_number(task, found.error)}"
    return f"{sign}{_number(task, abs(found.mean))}{error}, {found.verdict}"


def _number(task: Task, value: float) -> str:
    return f"{100 * value:.2f}" if task.higher_is_better else f"{value:.3f}"

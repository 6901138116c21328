"""The figures: quality against workers, quality against bytes, and what a slow worker costs the others."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, PercentFormatter

from benchmarks.campaign.figures import frame, label, legend, save
from benchmarks.campaign.methods import METHODS, SUBJECT
from benchmarks.campaign.tasks import TASKS, Task
from benchmarks.compare.results import Entry
from benchmarks.compare.straggler import Effect, title_of
from benchmarks.harness.plots import PALETTE, style_of


def draw(directory: Path, entries: Sequence[Entry], effects: Sequence[Effect]) -> list[Path]:
    """Write what there are results for; return the paths."""
    written = []
    tasks = [task for task in TASKS.values() if any(entry.task == task.key for entry in entries)]
    if tasks:
        written.append(save(_quality(tasks, entries), directory / "compare-workers.png"))
        written.append(save(_bytes(tasks, entries), directory / "compare-bytes.png"))
    if effects:
        written.append(save(_slow(effects), directory / "compare-slow-worker.png"))
    return written


def _quality(tasks: Sequence[Task], entries: Sequence[Entry]) -> Figure:
    figure, planes = frame(len(tasks))
    for task, plane in zip(tasks, planes, strict=True):
        here = [entry for entry in entries if entry.task == task.key and entry.scores is not None]
        served = [entry for entry in here if METHODS[entry.method].kind != "single"]
        counts = sorted({entry.workers for entry in served} or {1})
        for number, method in enumerate(METHODS.values()):
            curve = [entry for entry in served if entry.method == method.key]
            offset = 1 + 0.012 * (number - len(METHODS) / 2)  # so that error bars do not hide one another
            if curve:
                _plot(plane, method.key, [entry.workers * offset for entry in curve], task, curve, line=True)
        _single(plane, task, here)
        plane.set_xscale("log", base=2)
        plane.set_xticks(counts, labels=[str(count) for count in counts])
        plane.xaxis.set_minor_formatter(NullFormatter())
        plane.set_xlabel("workers")
        label(plane, task)
    return legend(figure, planes[0], 4)


def _bytes(tasks: Sequence[Task], entries: Sequence[Entry]) -> Figure:
    most = max(entry.workers for entry in entries)
    figure, planes = frame(len(tasks))
    for task, plane in zip(tasks, planes, strict=True):
        here = [entry for entry in entries if entry.task == task.key and entry.scores is not None]
        for entry in here:
            if entry.workers == most and METHODS[entry.method].kind != "single":
                megabytes = (entry.up_bytes + entry.down_bytes) / 1e6
                _plot(plane, entry.method, [megabytes], task, [entry], line=False)
        _single(plane, task, here)
        plane.set_xscale("log")
        plane.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        plane.xaxis.set_minor_formatter(NullFormatter())
        plane.set_xlabel(f"MB both ways, {most} workers together")
        label(plane, task)
    return legend(figure, planes[0], 4)


def _slow(effects: Sequence[Effect]) -> Figure:
    figure = Figure(figsize=(7.5, 0.9 + 0.4 * len(effects)), layout="constrained")
    plane = figure.add_subplot()
    colours = [PALETTE[1] if effect.share > 0.9 else PALETTE[0] for effect in effects]
    bars = plane.barh([title_of(effect) for effect in effects], [effect.share for effect in effects], color=colours)
    plane.bar_label(bars, labels=[f"{effect.share:.0%}" for effect in effects], padding=3)
    plane.axvline(0.9, color="#333333", linestyle=":")
    plane.invert_yaxis()
    plane.set_xlim(0, 1.15)
    plane.xaxis.set_major_formatter(PercentFormatter(1.0))
    plane.set_xlabel("throughput of the others beside a worker that is 10 times slower (dotted: 90 %)")
    plane.spines[["top", "right"]].set_visible(False)
    return figure


def _plot(plane: Axes, method: str, x: Sequence[float], task: Task, entries: Sequence[Entry], *, line: bool) -> None:
    colour, marker = style_of([*METHODS].index(method))
    plane.errorbar(
        x,
        [entry.scores.mean for entry in entries if entry.scores is not None],
        yerr=[entry.scores.deviation for entry in entries if entry.scores is not None],
        label=METHODS[method].title,
        color=colour,
        marker=marker,
        markersize=5,
        linewidth=2.2 if method == SUBJECT else 1.1,
        linestyle="-" if line else "none",
        capsize=2,
        elinewidth=0.8,
    )


def _single(plane: Axes, task: Task, entries: Sequence[Entry]) -> None:
    """Draw what one node without a server reaches, as a line across."""
    for entry in entries:
        if METHODS[entry.method].kind == "single" and entry.scores is not None:
            plane.axhline(entry.scores.mean, color="#333333", linestyle="--", label=METHODS[entry.method].title)

"""Curves: how good the first worker's model is after so many steps, and after so many bytes of all workers."""

from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from benchmarks.campaign.comparison import Cell, Runs
from benchmarks.campaign.figures import frame, label, legend, save
from benchmarks.campaign.tasks import TASKS
from benchmarks.evidence.report import title_of
from benchmarks.harness.plots import style_of


def draw(directory: Path, runs: Runs) -> list[Path]:
    """Write a figure a cell; return the paths."""
    written = []
    for cell in dict.fromkeys(cell for cell, _ in runs):
        kind = "simulated" if cell.simulated else "real"
        written.append(save(_figure(cell, runs), directory / f"evidence-{cell.task}-{kind}-{cell.workers}.png"))
    return written


def _figure(cell: Cell, runs: Runs) -> Figure:
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
    for plane in planes:
        label(plane, TASKS[cell.task])
    planes[0].set_xlabel(f"steps of each of {cell.workers} workers")
    planes[1].set_xlabel("MB both ways, all workers together")
    planes[1].set_xscale("log")
    return legend(figure, planes[0], 3)

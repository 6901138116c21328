"""The pictures: both distances of every tensor, what LDTE's estimate lets through, and the speedups."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.harness.plots import NEUTRAL, PALETTE
from benchmarks.ldte.findings import ALL, DENSITIES
from benchmarks.ldte.published import SPEEDUPS
from benchmarks.ldte.runs import Result
from benchmarks.ldte.speed import MERGED, Timing
from benchmarks.ldte.tables import DATASETS, NAMES

_DOTS_AN_INCH = 100
_LEAST = 0.01  # of k̂/k that the logarithmic axis shows; what is less lies on its edge


def draw(directory: Path, results: Sequence[Result]) -> list[Path]:
    """Write what there are results for; return the paths."""
    figures = {"ldte-distances.png": _distances(results), "ldte-estimates.png": _estimates(results)}
    if any(result.timings for result in results):
        figures["ldte-speed.png"] = _speed(results)
    for name, figure in figures.items():
        FigureCanvasAgg(figure)
        figure.savefig(directory / name, dpi=_DOTS_AN_INCH)
    return [directory / name for name in figures]


def _models(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(result.job.model for result in results))


def _distances(results: Sequence[Result]) -> Figure:
    models = _models(results)
    figure = Figure(figsize=(3.4 * len(models) + 0.4, 4.2), layout="constrained")
    planes = figure.subplots(1, len(models), squeeze=False, sharex=True, sharey=True)[0]
    for model, plane in zip(models, planes, strict=True):
        for colour, dataset in enumerate(DATASETS):
            for result in results:
                if (result.job.model, result.job.dataset) == (model, dataset):
                    _scatter(plane, result, PALETTE[colour], "os"[colour])
        plane.set_xscale("log")
        plane.set_yscale("log")
        ends = plane.get_xlim()
        plane.axline((ends[0], ends[0]), (ends[1], ends[1]), color=NEUTRAL, linewidth=1, linestyle="--")
        plane.set_title(NAMES.get(model, model), fontsize=10)
        plane.set_xlabel("distance to normal")
        plane.grid(True, alpha=0.25)
    planes[0].set_ylabel("distance to Laplace")
    handles, labels = planes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        "Gradients, last step: Wasserstein-1 distance to each fit, in standard deviations; "
        "below the line Laplace is nearer",
        fontsize=10,
    )
    return figure


def _scatter(plane: Axes, result: Result, colour: str, marker: str) -> None:
    found = result.of("gradient", result.job.steps)
    tensors = [finding for finding in found if finding.tensor != ALL]
    whole = [finding for finding in found if finding.tensor == ALL]
    dataset = DATASETS[result.job.dataset]
    for part, size, shape, label in ((tensors, 9, marker, "each tensor"), (whole, 170, "*", "all together")):
        plane.scatter(
            [finding.normal for finding in part],
            [finding.laplace for finding in part],
            s=size,
            marker=shape,
            color=colour,
            alpha=0.6 if part is tensors else 1.0,
            edgecolors="none" if part is tensors else "black",
            label=f"{dataset}, {label}",
        )


def _estimates(results: Sequence[Result]) -> Figure:
    models = _models(results)
    figure = Figure(figsize=(10.4, 4.2), layout="constrained")
    for plane, kind in zip(figure.subplots(1, 2, sharey=True), ("gradient", "residual"), strict=True):
        for number, density in enumerate(DENSITIES):
            boxes = []
            for model in models:
                mine = [result for result in results if result.job.model == model]
                found = [f for result in mine for f in result.of(kind, result.job.steps) if f.tensor != ALL]
                ratios = [t.first for f in found for t in f.thresholds if t.density == density]
                boxes.append([max(_LEAST, ratio) for ratio in ratios])
            drawn = plane.boxplot(
                boxes,
                positions=[place + 0.36 * number - 0.18 for place in range(len(models))],
                widths=0.3,
                whis=(10, 90),
                showfliers=False,
                patch_artist=True,
                medianprops={"color": "black"},
                label=f"density {density:.1%}",
            )
            for box in drawn["boxes"]:
                box.set_facecolor(PALETTE[number])
        plane.axhspan(0.9, 1.1, color=NEUTRAL, alpha=0.3, label="within ±10 %: no search")
        plane.set_xticks(range(len(models)), labels=[NAMES.get(model, model) for model in models])
        plane.set_yscale("log")
        plane.set_title(f"{kind}s by tensor", fontsize=10)
        plane.grid(True, axis="y", alpha=0.25)
    figure.axes[0].set_ylabel(f"k̂/k above b·ln(n/k) ({_LEAST:g}: or less)")
    figure.axes[0].legend(frameon=False, fontsize=9)
    figure.suptitle("What LDTE's first threshold lets through (boxes: quartiles; whiskers: 10 % and 90 %)", fontsize=10)
    return figure


def _speed(results: Sequence[Result]) -> Figure:
    timings = {
        result.job.model: timing
        for result in results
        for timing in result.timings
        if (timing.over, timing.density, timing.device) == (MERGED, DENSITIES[0], "CPU")
    }
    figure = Figure(figsize=(8.6, 4.2), layout="constrained")
    plane = figure.subplots()
    groups = {
        "LDTE-BS, selection alone: published (GPU)": [SPEEDUPS.get(model, 0) for model in timings],
        "the same here (CPU, plain torch)": [timing.published["median"] for timing in timings.values()],
        "whole step: ldte (compiled passes)": _times(timings, "ldte"),
        "whole step: sampled": _times(timings, "sampled"),
        "whole step: warm": _times(timings, "warm"),
    }
    for number, (label, heights) in enumerate(groups.items()):
        places = [place + 0.17 * (number - 2) for place in range(len(timings))]
        drawn = plane.bar(places, heights, 0.15, label=label, color=PALETTE[number], zorder=2)
        plane.bar_label(drawn, fmt="%.3g", fontsize=7, padding=1)
    plane.axhline(1, color="black", linewidth=0.8)
    plane.set_yscale("log")
    plane.margins(y=0.15)
    plane.set_xticks(range(len(timings)), labels=[NAMES.get(model, model) for model in timings])
    plane.set_ylabel("times as fast as torch.topk")
    plane.grid(True, axis="y", alpha=0.25, zorder=0)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.suptitle("All tensors in one vector, density 1 %", fontsize=10)
    return figure


def _times(timings: dict[str, Timing], method: str) -> list[float]:
    return [timing.times[method]["median"] for timing in timings.values()]

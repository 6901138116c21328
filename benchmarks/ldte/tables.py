"""The report: how far gradients are from each fit, what LDTE's estimate is worth, what selecting costs."""

import itertools
from collections.abc import Sequence
from statistics import median

import torch
from matplotlib.axes import Axes

from benchmarks.harness.plots import NEUTRAL, PALETTE, Plot, frame, legend
from benchmarks.harness.section import Section, Table
from benchmarks.ldte.capture import DENSITY, MOMENTUM, RATE
from benchmarks.ldte.findings import ALL, DENSITIES, Finding
from benchmarks.ldte.published import SPEEDUPS, TOLERANCE
from benchmarks.ldte.runs import Result
from benchmarks.ldte.speed import LDTE, MERGED, OURS, TOPK, Timing
from pscore.selection import DEFAULT_DENSE_BELOW

NAMES = {
    "resnet101": "ResNet-101",
    "densenet169": "DenseNet-169",
    "resnet50": "ResNet-50",
    "densenet121": "DenseNet-121",
    "alexnet": "AlexNet",
    "vgg19": "VGG-19",
    "senet18": "SENet-18",
}
DATASETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
NOT_MEASURED = "not measured"


def name_of(result: Result) -> str:
    """Return a run's name for a reader: model and dataset."""
    return f"{NAMES.get(result.job.model, result.job.model)}, {DATASETS[result.job.dataset]}"


def section(results: Sequence[Result]) -> Section:
    """Make a section of what was measured."""
    made = Section("ldte", "Laplace thresholds (LDTE-BS) on captured gradients", notes=_notes(results))
    made.tables = [distances(results), course(results), estimates(results)]
    if any(result.timings for result in results):
        made.tables += [beside_published(results), *speeds(results)]
    made.plots = [_drawn(results)]
    made.figures = {name_of(result): result.plain() for result in results}
    return made


def _notes(results: Sequence[Result]) -> list[str]:
    """Say how it was measured."""
    job = results[0].job
    data = "the dataset in the folder given" if job.data else "scikit-learn's digits in CIFAR's format, **not CIFAR**"
    said = [
        f"Data: {data}. Models, augmentation and data files as `examples/cifar10.py` makes and reads them; a run is "
        f"{job.steps} steps of DGS at batch {job.batch_size}, rate {RATE:g}, momentum {MOMENTUM:g}, density "
        f"{DENSITY:.0%} by tensor, one worker: the very beginning of a training.",
        f"Tensors: those of {DEFAULT_DENSE_BELOW} elements or more, which are the ones that are selected from, and all "
        "parameters laid end to end. Normal: mean and standard deviation; Laplace: median and mean distance from it. "
        "The distance is the area between the distribution functions, exactly and of every element "
        "(`benchmarks/ldte/fits.py`).",
        "Gradients: of one batch. Residuals: what DGS selects from, the gradients of all steps less what was sent.",
        "k̂/k and passes are those of the published search; if a cell has two figures, one is of each dataset.",
    ]
    if job.rounds:
        said.append(
            f"Times: {torch.get_num_threads()} threads, {job.rounds} rounds over the last three steps of a run "
            f"({DATASETS[job.dataset]}); every method gets the same residual and the same gradient. torch.topk and "
            "LDTE-BS in plain torch: `add_`, select, gather, scale what was taken; the others accumulate in the pass "
            f"that selects. By tensor leaves those below {DEFAULT_DENSE_BELOW} elements out."
        )
    return said


def _drawn(results: Sequence[Result]) -> Plot:
    """Draw both distances of every tensor."""
    models = list(dict.fromkeys(result.job.model for result in results))
    figure, planes = frame(len(models), 3.4, 4.2, share=True)
    for model, plane in zip(models, planes, strict=True):
        for result in results:
            if result.job.model == model:
                _scatter(plane, result)
        plane.set_xscale("log")
        plane.set_yscale("log")
        ends = plane.get_xlim()
        plane.axline((ends[0], ends[0]), (ends[1], ends[1]), color=NEUTRAL, linewidth=1, linestyle="--")
        plane.set_title(NAMES.get(model, model), fontsize=10)
        plane.set_xlabel("distance to normal")
    planes[0].set_ylabel("distance to Laplace")
    caption = "Gradients, last step: Wasserstein-1 distance to each fit; below the line Laplace is nearer."
    return Plot("ldte-distances", "Distances to each fit", caption, legend(figure, planes[0], 4))


def _scatter(plane: Axes, result: Result) -> None:
    colour, marker = [(PALETTE[0], "o"), (PALETTE[1], "s")][[*DATASETS].index(result.job.dataset)]
    tensors, whole = _parted(result.of("gradient", result.job.steps))
    for part, size, shape, label in ((tensors, 9, marker, "each tensor"), ([whole], 170, "*", "all together")):
        plane.scatter(
            [finding.normal for finding in part],
            [finding.laplace for finding in part],
            s=size,
            marker=shape,
            color=colour,
            alpha=0.6 if part is tensors else 1.0,
            edgecolors="none" if part is tensors else "black",
            label=f"{DATASETS[result.job.dataset]}, {label}",
        )


def distances(results: Sequence[Result]) -> Table:
    """Compare both fits at the end of each run."""
    rows = []
    for result, kind in itertools.product(results, ("gradient", "residual")):
        tensors, whole = _parted(result.of(kind, result.job.steps))
        rows.append(
            (
                f"{name_of(result)}, {kind}s",
                str(len(tensors)),
                f"{whole.zeros:.0%}",
                f"{_share_nearer(tensors):.0%}",
                f"{median(f.normal for f in tensors):.3f}",
                f"{median(f.laplace for f in tensors):.3f}",
                f"{whole.normal:.3f}",
                f"{whole.laplace:.3f}",
            )
        )
    heads = (
        "", "tensors", "zeros", "Laplace nearer", "to normal, median", "to Laplace, median",
        "all together: to normal", "to Laplace",
    )  # fmt: skip
    return Table("Wasserstein-1 distance to each fit, in standard deviations, at the last step", heads, rows)


def course(results: Sequence[Result]) -> Table:
    """Follow both fits over the steps that were examined."""
    steps = sorted({step for result in results for step in result.losses})
    rows = []
    for result in results:
        cells = []
        for step in steps:
            found = result.of("gradient", step)
            if not found:
                cells.append("")
                continue
            tensors, whole = _parted(found)
            ratio = median(finding.ratio for finding in tensors)
            cells.append(f"{_share_nearer(tensors):.0%}, {ratio:.2f}, {whole.ratio:.2f}")
        losses = " → ".join(f"{result.losses[step]:.2f}" for step in sorted(result.losses))
        rows.append((name_of(result), *cells, losses))
    title = (
        "Over the run: share of tensors to which Laplace is nearer; distance to Laplace over distance to normal, "
        "median of the tensors; the same of all together"
    )
    return Table(title, ("gradients of", *(f"step {step}" for step in steps), "loss"), rows)


def estimates(results: Sequence[Result]) -> Table:
    """Show what LDTE's first threshold lets through and how long the search goes on, at the end of the runs."""
    rows = []
    for model in dict.fromkeys(result.job.model for result in results):
        mine = [result for result in results if result.job.model == model]
        for kind in ("gradient", "residual"):
            found = [finding for result in mine for finding in result.of(kind, result.job.steps)]
            for density in DENSITIES:
                rows.append((f"{NAMES.get(model, model)}, {kind}s, {density:.1%}", *_estimate(found, density)))
    heads = (
        "", "k̂/k by tensor: median (10 %–90 %)", f"within ±{TOLERANCE:.0%}", "passes: median (most)",
        "all together: k̂/k", "passes",
    )  # fmt: skip
    return Table(
        "Entries above the first threshold b·ln(n/k) over k, and counting passes until within ±10 %", heads, rows
    )


def speeds(results: Sequence[Result]) -> list[Table]:
    """Compare a whole step of every method with torch.topk's."""
    tables = []
    for device in _devices(results):
        rows = []
        for result, timing in _timings(results, device):
            rows.append(
                (
                    f"{NAMES.get(result.job.model, result.job.model)}, {timing.over}, {timing.density:.1%}",
                    f"{timing.step[TOPK]['median'] * 1e3:.0f}",
                    *(f"×{timing.times[method]['median']:.2f}" for method in (LDTE, *OURS)),
                )
            )
        heads = ("", "torch.topk, ms", LDTE, *(f"`{method}`" for method in OURS))
        title = f"A step (accumulate, select, take out) on {device}: how many times as fast as with torch.topk"
        tables.append(Table(title, heads, rows))
    return tables


def beside_published(results: Sequence[Result]) -> Table:
    """Put the published speedups beside ours."""
    here = _devices(results)
    rows = []
    for model in dict.fromkeys(result.job.model for result in results):
        cells = [f"×{SPEEDUPS[model]:.2f}" if model in SPEEDUPS else "–"]
        for density in DENSITIES:
            cells.append(_alone(results, model, density, "CPU"))
        gpu = next((device for device in here if device != "CPU"), "")
        cells.append(_alone(results, model, DENSITIES[0], gpu) if gpu else NOT_MEASURED)
        rows.append((NAMES.get(model, model), *cells))
    heads = (
        "LDTE-BS over radix select, selection alone, all tensors in one vector",
        "published, GPU",
        *(f"here, CPU, {density:.1%}" for density in DENSITIES),
        "here, GPU, 1 %",
    )
    return Table("The published speedups, and the same ratio here: both in plain torch, round by round", heads, rows)


def _alone(results: Sequence[Result], model: str, density: float, device: str) -> str:
    for result, timing in _timings(results, device):
        if (result.job.model, timing.density, timing.over) == (model, density, MERGED):
            found = timing.published
            return f"×{found['median']:.2f} ({found['min']:.2f}–{found['max']:.2f})"
    return NOT_MEASURED


def _timings(results: Sequence[Result], device: str) -> list[tuple[Result, Timing]]:
    return [(result, timing) for result in results for timing in result.timings if timing.device == device]


def _devices(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(timing.device for result in results for timing in result.timings))


def _parted(found: Sequence[Finding]) -> tuple[list[Finding], Finding]:
    return [finding for finding in found if finding.tensor != ALL], next(f for f in found if f.tensor == ALL)


def _share_nearer(tensors: Sequence[Finding]) -> float:
    return sum(finding.ratio < 1 for finding in tensors) / len(tensors)


def _estimate(found: Sequence[Finding], density: float) -> tuple[str, ...]:
    parts: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
    for finding in found:
        for threshold in finding.thresholds:
            if threshold.density == density:
                parts[finding.tensor == ALL].append((threshold.first, threshold.passes))
    ratios, passes = sorted(first for first, _ in parts[False]), [count for _, count in parts[False]]
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    within = sum(abs(ratio - 1) <= TOLERANCE for ratio in ratios) / len(ratios)
    return (
        f"{median(ratios):.2f} ({low:.2f}–{high:.2f})",
        f"{within:.0%}",
        f"{median(passes):.0f} ({max(passes)})",
        ", ".join(f"{first:.2f}" for first, _ in parts[True]),
        ", ".join(str(count) for _, count in parts[True]),
    )

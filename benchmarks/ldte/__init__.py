"""Section *ldte*: are gradients Laplace distributed, what is LDTE-BS's estimate worth, and what does it cost.

On its own, with the seven networks of the paper: ``python -m benchmarks.ldte``.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import plots
from benchmarks.harness.section import Plan, Plot, Section
from benchmarks.ldte import tables
from benchmarks.ldte.capture import DENSITY, MOMENTUM, RATE
from benchmarks.ldte.runs import Job, Result
from benchmarks.ldte.runs import run as run_job
from benchmarks.ldte.speed import MERGED, OURS, TOPK
from pscore.selection import DEFAULT_DENSE_BELOW

KEY, TITLE = "ldte", "Laplace thresholds (LDTE-BS) on captured gradients"

_QUICK, _FULL = ("densenet121",), ("densenet121", "densenet169")


def run(plan: Plan) -> Section:
    """Measure the smaller models, on digits in CIFAR's format; :mod:`benchmarks.ldte.__main__` takes all seven."""
    results: list[Result] = []
    try:
        with tempfile.TemporaryDirectory() as made:
            for model in _QUICK if plan.quick else _FULL:
                if results and not plan.has_time(25):
                    break
                job = Job("cifar10", model, seed=plan.seed, steps=16, rounds=5)
                if plan.quick:
                    job = Job("cifar10", model, seed=plan.seed, batch_size=8, steps=2, rounds=2, densities=(0.01,))
                plan.say(tables.NAMES[model])
                results.append(run_job(job, Path(made), plan.say, plan.has_time))
    except ModuleNotFoundError as error:
        return Section(KEY, TITLE, notes=[f"Not measured: {error}"])
    return section(results)


def section(results: Sequence[Result]) -> Section:
    """Make a section of what was measured."""
    made = Section(KEY, TITLE)
    made.tables += [tables.distances(results), tables.course(results), tables.estimates(results)]
    if any(result.timings for result in results):
        made.tables += [tables.beside_published(results), *tables.speeds(results)]
        made.plots += _bars(results)
    made.notes += notes(results)
    made.figures = {tables.name_of(result): _figures(result) for result in results}
    return made


def notes(results: Sequence[Result]) -> list[str]:
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
        "k̂/k and passes are those of the published search; where a cell holds two figures, one is of each dataset.",
    ]
    timed = next((result.job for result in results if result.timings), None)
    if timed:
        said += [
            f"Times: {torch.get_num_threads()} threads, {timed.rounds} rounds over the last three steps of a run "
            f"({tables.DATASETS[timed.dataset]}); every method gets the same residual and the same gradient. "
            "torch.topk and LDTE-BS in plain torch: `add_`, select, gather, scale what was taken; the others "
            "accumulate in the pass that selects. "
            f"By tensor leaves those below {DEFAULT_DENSE_BELOW} elements out.",
        ]
        if all(timing.device == "CPU" for result in results for timing in result.timings):
            said.append("CUDA: no device here, so nothing is measured on one.")
    return said


def _bars(results: Sequence[Result]) -> list[Plot]:
    drawn = []
    for result in results:
        for timing in result.timings:
            if timing.over == MERGED and timing.density == result.job.densities[0]:
                values = [(method, timing.times[method]["median"]) for method in (TOPK, "LDTE-BS", *OURS)]
                title = f"{tables.name_of(result)}, {timing.density:.1%}, on {timing.device}"
                drawn.append(plots.bars(title, "A step; more is better.", "times as fast as torch.topk", values))
    return drawn


def _figures(result: Result) -> dict[str, Any]:
    found = result.plain()
    return {"losses": found["losses"], "timings": found["timings"], "findings": len(result.findings)}

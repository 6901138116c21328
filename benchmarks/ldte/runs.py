"""One training run of one model on one dataset, and all that is found out on the way; kept as JSON to go on later."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.ldte.capture import moments, training_images
from benchmarks.ldte.findings import DENSITIES, Finding, examine
from benchmarks.ldte.networks import make_model
from benchmarks.ldte.speed import BY_TENSOR, MERGED, Timing, measure

_TIMED_STEPS = 3


@dataclass(frozen=True, slots=True)
class Job:
    """What to run.

    Attributes:
        dataset: ``cifar10`` or ``cifar100``.
        model: see :func:`~benchmarks.ldte.networks.make_model`.
        data: where the dataset is; ``None`` for digits in its format.
        batch_size: of a step.
        steps: of the run.
        seed: of the model and of the order of the images.
        rounds: of timing; 0 for none.
        densities: at which to time.
    """

    dataset: str
    model: str
    data: Path | None = None
    batch_size: int = 16
    steps: int = 16
    seed: int = 0
    rounds: int = 0
    densities: tuple[float, ...] = DENSITIES

    @property
    def examined(self) -> list[int]:
        """The steps that are looked at: the first, the last, and the one between that is as far from both by factor."""
        return sorted({1, round(self.steps**0.5), self.steps})

    def plain(self) -> dict[str, Any]:
        return asdict(self) | {"data": self.data and str(self.data), "densities": list(self.densities)}


@dataclass
class Result:
    """What a job has found out.

    Attributes:
        job: what was run.
        losses: by step that was examined.
        findings: of every vector at these steps.
        timings: by density, way of laying the tensors, and device.
    """

    job: Job
    losses: dict[int, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        return {
            "job": self.job.plain(),
            "losses": self.losses,
            "findings": [finding.plain() for finding in self.findings],
            "timings": [asdict(timing) for timing in self.timings],
        }

    def of(self, kind: str, step: int) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == kind and finding.step == step]


def devices() -> list[torch.device]:
    """Return what to time on: the CPU, and a GPU where there is one."""
    return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]


def run(job: Job, made: Path, say: Callable[[str], None], has_time: Callable[[], bool] = lambda: True) -> Result:
    """Train, examine, time.

    Args:
        job: what.
        made: where made data go.
        say: shows what is going on.
        has_time: where it says no, timing repeats no more.
    """
    say("load data, make the model")
    images: Any = training_images(job.dataset, job.data, made)
    torch.manual_seed(job.seed)
    model = make_model(job.model, len(images.classes))
    result = Result(job)
    timed = [step for step in range(job.steps - _TIMED_STEPS + 1, job.steps + 1) if step > 0 and job.rounds]
    kept = []
    place = devices()[-1]
    for moment in moments(model, images, job.batch_size, [*job.examined, *timed], job.seed, place):
        say(f"step {moment.step} of {job.steps}, loss {moment.loss:.3f}")
        if moment.step in job.examined:
            result.losses[moment.step] = moment.loss
            result.findings += examine(moment)
        if moment.step in timed:
            kept.append(moment)
    if kept:
        for device in devices():
            for density in job.densities:
                for over in (MERGED, BY_TENSOR):
                    say(f"time {over}, {density:.1%}, on {device}")
                    result.timings.append(measure(kept, over, density, job.rounds, device, has_time))
    return result


def run_once(job: Job, directory: Path, say: Callable[[str], None]) -> Result:
    """Run, or read what the same job has left in the directory before."""
    path = directory / f"{job.dataset}-{job.model}.json"
    if path.exists():
        found = json.loads(path.read_text())
        if found["job"] == job.plain():
            return read(job, found)
    result = run(job, directory / "data", say)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result.plain()))
    partial.replace(path)
    return result


def read(job: Job, plain: dict[str, Any]) -> Result:
    """Read what :meth:`Result.plain` has made."""
    return Result(
        job,
        {int(step): loss for step, loss in plain["losses"].items()},
        [Finding.read(each) for each in plain["findings"]],
        [Timing(**each) for each in plain["timings"]],
    )

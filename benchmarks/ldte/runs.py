"""One training run of one model on one dataset, and all that is found out on the way; kept as JSON to go on later."""

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
        rounds: of timing; 0 for none.
    """

    dataset: str
    model: str
    data: Path | None = None
    batch_size: int = 16
    steps: int = 16
    rounds: int = 0

    @property
    def examined(self) -> list[int]:
        """The steps that are looked at: the first, the last, and the one between that is as far from both by factor."""
        return sorted({1, round(self.steps**0.5), self.steps})


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
        """Return what JSON can have, but the job."""
        return {
            "losses": list(self.losses.items()),
            "findings": [asdict(finding) for finding in self.findings],
            "timings": [asdict(timing) for timing in self.timings],
        }

    @classmethod
    def read(cls, job: Job, plain: dict[str, Any]) -> "Result":
        """Read what :meth:`plain` has made."""
        findings = [Finding.read(each) for each in plain["findings"]]
        return cls(job, dict(plain["losses"]), findings, [Timing(**each) for each in plain["timings"]])

    def of(self, kind: str, step: int) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == kind and finding.step == step]


def devices() -> list[torch.device]:
    """Return what to time on: the CPU, and a GPU where there is one."""
    return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]


def run(job: Job, made: Path, say: Callable[[str], None]) -> Result:
    """Train, examine, time.

    Args:
        job: what.
        made: where made data go.
        say: shows what is going on.
    """
    say("load data, make the model")
    images: Any = training_images(job.dataset, job.data, made)
    torch.manual_seed(0)
    model = make_model(job.model, len(images.classes))
    result = Result(job)
    timed = [step for step in range(job.steps - _TIMED_STEPS + 1, job.steps + 1) if step > 0 and job.rounds]
    kept = []
    place = devices()[-1]
    for moment in moments(model, images, job.batch_size, [*job.examined, *timed], 0, place):
        say(f"step {moment.step} of {job.steps}, loss {moment.loss:.3f}")
        if moment.step in job.examined:
            result.losses[moment.step] = moment.loss
            result.findings += examine(moment)
        if moment.step in timed:
            kept.append(moment)
    if kept:
        for device in devices():
            for density in DENSITIES:
                for over in (MERGED, BY_TENSOR):
                    say(f"time {over}, {density:.1%}, on {device}")
                    result.timings.append(measure(kept, over, density, job.rounds, device))
    return result

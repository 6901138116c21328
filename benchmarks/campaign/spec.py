"""What one run is, and what came of it: both as plain JSON, so that a run that was done is never done again."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import psclient
from benchmarks.campaign.methods import METHODS
from benchmarks.campaign.tasks import TASKS


@dataclass(frozen=True, slots=True)
class Form:
    """What a sparse method sends and gets; a dense one takes no notice.

    Attributes:
        budget: share of the dense bytes each way; 0 for what the others say.
        reply_budget: that of the replies; 0 for the same.
        density: share of the entries of a large tensor, in a push and in a top-k reply.
        values: how pushed values travel.
        replies: ``auto``, ``exact`` or ``topk``.
        down_values: how the values of a top-k reply travel.
        residuals: what residuals and momenta are kept in.
    """

    density: float = 1.0
    budget: float = 0.0
    reply_budget: float = 0.0
    values: str = "fp32"
    replies: str = "auto"
    down_values: str = "fp32"
    residuals: Literal["fp32", "bf16"] = "fp32"

    @property
    def size(self) -> dict[str, float | psclient.Budget]:
        """What a sparse method is told."""
        if self.reply_budget:
            return {"budget": psclient.Budget(share=self.budget, reply_share=self.reply_budget)}
        return {"budget": self.budget} if self.budget else {"density": self.density}

    @property
    def server(self) -> dict[str, object]:
        """Settings of the server."""
        return {"down_density": self.density, "down_mode": self.replies, "down_value_type": self.down_values}


@dataclass(frozen=True, slots=True)
class Spec:
    """Everything that determines a run, chance apart.

    Attributes:
        task: key of the task.
        method: key of the method.
        workers: how many share the samples.
        seed: of the weights and of the order of the data.
        samples: of all workers together.
        rate: effective learning rate, ``lr / (1 - momentum)``.
        momentum: of the method.
        form: what a sparse method sends.
        validation: the model is measured on the data to choose settings by, not on the test data.
        pace: seconds that a worker's step lasts at least, so that the machine's load makes no staleness.
        simulated: one process holds all workers, which take turns at random.
        points: how often the first worker's model is measured on the way.
    """

    task: str
    method: str
    workers: int
    seed: int
    samples: int
    rate: float
    momentum: float
    form: Form
    validation: bool = False
    pace: float = 0.0
    simulated: bool = False
    points: int = 0

    @property
    def key(self) -> str:
        """What tells this run from every other, the settings of the method's server included."""
        spec = asdict(self)
        if not self.form.reply_budget:
            del spec["form"]["reply_budget"]  # which the runs of before do not have
        if self.form.residuals == "fp32":
            del spec["form"]["residuals"]  # likewise
        return json.dumps(spec | {"server": METHODS[self.method].server(self.workers)}, sort_keys=True)

    @property
    def expected_seconds(self) -> float:
        """Guess how long it takes."""
        return max(TASKS[self.task].expected_seconds * self.samples / 1000, self.steps * self.pace)

    @property
    def steps(self) -> int:
        """Steps of each worker."""
        return self.samples // (TASKS[self.task].batch_size * self.workers)

    @property
    def learning_rate(self) -> float:
        return self.rate * (1 - self.momentum) * METHODS[self.method].rate_scale


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run.

    Attributes:
        score: the task's metric of the server's model at the end, on data held out; ``None`` where training diverged.
        loss: its loss on them; ``None`` likewise.
        up_bytes: messages of all pushes; the upload of the initial model is not among them.
        down_bytes: messages of all pulls; the first download of each worker is not among them.
        versions: updates that the server applied: pushes, or rounds of a synchronous method.
        mean_staleness: pushes of others between a worker's replica and its push, over all steps.
        p99_staleness: 99 of 100 steps were no staler.
        refused: parts of pushes that the server did not take, and that went back into the residual.
        seconds: from the first step until the last worker was done.
        curve: of the first worker's model on the way: steps, bytes up and down of all workers, and the score.
    """

    score: float | None
    loss: float | None
    up_bytes: int
    down_bytes: int
    versions: int
    mean_staleness: float
    p99_staleness: float
    refused: int
    seconds: float
    curve: list[tuple[int, int, int, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Run:
    spec: Spec
    outcome: Outcome

    def plain(self) -> dict[str, Any]:
        return {"spec": asdict(self.spec), "outcome": asdict(self.outcome)}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> "Run":
        """Read what :meth:`plain` wrote."""
        return cls(Spec(**plain["spec"] | {"form": Form(**plain["spec"]["form"])}), Outcome(**plain["outcome"]))

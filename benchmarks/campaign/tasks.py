"""What is trained: a task gives a model, batches for each worker, a loss, and how good a model is on data held out."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.campaign import digits, fashion, language, text

Batch = tuple[torch.Tensor, torch.Tensor]
_TOGETHER = 512  # samples that are measured together


class Quality(NamedTuple):
    """How good a model is on the test data: mean cross-entropy in nats, and the share that is classified right."""

    loss: float
    accuracy: float

    def of(self, metric: str) -> float:
        return self.accuracy if metric == "accuracy" else self.loss


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    Attributes:
        key: its name in settings and files.
        title: its name for readers.
        metric: which field of :class:`Quality` counts.
        batch_size: samples of one step of one worker.
        rates: effective learning rates ``lr / (1 - momentum)`` that the search begins with, ascending.
        make_model: builds the network; its weights come from torch's global generator.
        batches: endless batches of one worker of so many, from a seed.
        held_out: inputs and targets that no worker sees: to test with, or (true) others to choose settings by.
        source: what the data are, so that a reader can tell whether two machines had the same.
        expected_seconds: of a thousand samples, on two cores; for the first guess at the time that is left.
        is_here: tells whether the data need not be fetched first.
    """

    key: str
    title: str
    metric: str
    batch_size: int
    rates: tuple[float, ...]
    make_model: Callable[[], nn.Module]
    batches: Callable[[int, int, int, int], Iterator[Batch]]
    held_out: Callable[[bool], Batch]
    source: Callable[[], str]
    expected_seconds: float
    is_here: Callable[[], bool] = field(default=lambda: True)

    @property
    def higher_is_better(self) -> bool:
        """Tell which way the metric goes."""
        return self.metric == "accuracy"

    def initial_model(self, seed: int) -> nn.Module:
        """Return the network as every run with this seed begins with it."""
        torch.manual_seed(seed)
        return self.make_model()

    def draws(self, seed: int, worker: int, workers: int) -> Iterator[Batch]:
        """Return what a worker trains on: the same for every method."""
        return self.batches(self.batch_size, 1000 * seed + worker, worker, workers)

    def evaluate(self, model: nn.Module, validation: bool, most: int | None = None) -> Quality:
        """Measure a model, on ``most`` samples; it is left in evaluation mode."""
        model.eval()
        inputs, targets = (part[:most] for part in self.held_out(validation))
        loss = right = 0.0
        with torch.inference_mode():
            for given, wanted in zip(torch.split(inputs, _TOGETHER), torch.split(targets, _TOGETHER), strict=True):
                scores = model(given).flatten(0, -2)
                loss += nn.functional.cross_entropy(scores, wanted.flatten(), reduction="sum").item()
                right += (scores.argmax(-1) == wanted.flatten()).sum().item()
        return Quality(loss / targets.numel(), right / targets.numel())


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the training loss: the mean cross-entropy over all predictions."""
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


TASKS = {
    task.key: task
    for task in (
        Task(
            key="digits",
            title="handwritten digits",
            metric="accuracy",
            batch_size=16,
            rates=(0.1, 0.2, 0.4),
            make_model=digits.make_model,
            batches=digits.batches,
            held_out=digits.held_out,
            source=digits.source,
            expected_seconds=0.3,
        ),
        Task(
            key="language",
            title="Python source, byte by byte",
            metric="loss",
            batch_size=16,
            rates=(0.5, 1.0, 2.0),
            make_model=language.make_model,
            batches=language.batches,
            held_out=language.held_out,
            source=language.source,
            expected_seconds=0.6,
        ),
        Task(
            key="text-tiny",
            title="Python source, small transformer",
            metric="loss",
            batch_size=8,
            rates=(0.0625, 0.125, 0.25),
            make_model=text.make_tiny,
            batches=language.batches,
            held_out=language.held_out,
            source=language.source,
            expected_seconds=0.9,
        ),
        Task(
            key="fashion-tiny",
            title="Fashion-MNIST, small network",
            metric="accuracy",
            batch_size=16,
            rates=(0.1, 0.2, 0.4),
            make_model=fashion.make_tiny,
            batches=fashion.batches,
            held_out=fashion.held_out,
            source=fashion.source,
            expected_seconds=1.0,
            is_here=fashion.is_here,
        ),
        Task(
            key="text",
            title="English, transformer",
            metric="loss",
            batch_size=8,
            rates=(0.0625, 0.125, 0.25),
            make_model=text.make_model,
            batches=text.batches,
            held_out=text.held_out,
            source=text.source,
            expected_seconds=25.0,
            is_here=text.is_here,
        ),
        Task(
            key="fashion",
            title="Fashion-MNIST, residual network",
            metric="accuracy",
            batch_size=32,
            rates=(0.1, 0.2, 0.4),
            make_model=fashion.make_model,
            batches=fashion.batches,
            held_out=fashion.held_out,
            source=fashion.source,
            expected_seconds=6.0,
            is_here=fashion.is_here,
        ),
    )
}
"""All tasks by key."""

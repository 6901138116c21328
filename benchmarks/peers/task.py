"""The job that every peer does: a small network on handwritten digits, two workers, SGD steps as they come.

The servers apply each gradient when it arrives and answer with the parameters: asynchronous SGD, in every case but the
sparse one, where the answer is what changed.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from sklearn.datasets import load_digits
from torch import nn

LEARNING_RATE = 0.1
WORKERS = 2
CALL_SECONDS = 60.0
"""Longest time for one message of any peer."""

_TRAIN, _BATCH = 1500, 64
_WARM_STEPS = 5
_LAYERS, _WIDTH = 19, 240

_Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Job:
    """What each worker does.

    Attributes:
        steps: after the warm-up.
        seed: of everything.
        gradients_given: the model has 38 tensors, computes nothing, and has the same gradients at each step; else the
            network learns digits.
    """

    steps: int
    seed: int
    gradients_given: bool = False

    @property
    def exchanges(self) -> int:
        """What a server sees from all workers."""
        return WORKERS * (_WARM_STEPS + self.steps)


def model_of(job: Job) -> nn.Sequential:
    """Return the model of a job: 1.1 million parameters in either case."""
    if not job.gradients_given:
        return make_model(job.seed)
    torch.manual_seed(job.seed)
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))


def make_model(seed: int) -> nn.Sequential:
    """Return the network that learns digits."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


def train(connection: Connection, job: Job, worker: int, model: nn.Module, exchange: Callable[[], None]) -> None:
    """Warm up, say so, wait for the word, train, report, and keep all connections until told that it is over.

    Args:
        connection: to the benchmark.
        job: what to do.
        worker: number of this one.
        model: whose gradients ``exchange`` sends, and whose parameters it brings.
        exchange: called after each backward pass.
    """
    step = _given(job, model, exchange) if job.gradients_given else _learning(job, worker, model, exchange)
    for _ in range(_WARM_STEPS):
        step()
    connection.send("ready")
    connection.recv()
    losses = []
    started = time.perf_counter()
    for _ in range(job.steps):
        losses.append(step())
    seconds = time.perf_counter() - started
    last = losses[-max(1, job.steps // 10) :]
    accuracy = 0.0 if job.gradients_given else _accuracy(model)
    connection.send({"seconds": seconds, "loss": sum(last) / len(last), "accuracy": accuracy})
    connection.recv()


def _given(job: Job, model: nn.Module, exchange: Callable[[], None]) -> Callable[[], float]:
    generator = torch.Generator().manual_seed(job.seed)
    for parameter in model.parameters():
        parameter.grad = 1e-3 * torch.randn(parameter.shape, generator=generator)

    def step() -> float:
        exchange()
        return 0.0

    return step


def _learning(job: Job, worker: int, model: nn.Module, exchange: Callable[[], None]) -> Callable[[], float]:
    draws = batches(job.seed + 1 + worker)
    return lambda: _step(model, draws, exchange)


def _step(model: nn.Module, draws: Iterator[_Batch], exchange: Callable[[], None]) -> float:
    x, y = next(draws)
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    exchange()
    return loss.item()


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(images).float()[order] / 16, torch.from_numpy(labels)[order]


def batches(seed: int) -> Iterator[_Batch]:
    images, labels = _data()
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(_TRAIN, (_BATCH,), generator=generator)
        yield images[chosen], labels[chosen]


@torch.no_grad()
def _accuracy(model: nn.Module) -> float:
    images, labels = _data()
    return (model(images[_TRAIN:]).argmax(1) == labels[_TRAIN:]).float().mean().item()

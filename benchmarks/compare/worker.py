"""One worker of a run: an ordinary training loop, and what is counted beside it."""

import math
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy
import numpy.typing
import torch

from benchmarks.compare.methods import METHODS, Setup
from benchmarks.compare.spec import Spec
from benchmarks.compare.tasks import TASKS, loss_of
from psclient import settings as client_settings
from psclient.errors import NonFiniteGradientError
from psclient.optim.base import ParameterServerOptimizer

CALL_SECONDS = 60.0
"""Longest wait of a worker for its server."""
LARGEST_NORM = 1.0
"""Of the gradient that a worker hands to its method."""


@dataclass(slots=True)
class Told:
    """What a worker tells at its end.

    Attributes:
        diverged: a loss or a gradient was not finite, and training ended there.
        state: the trained weights; of a single node alone, others have them on the server.
    """

    diverged: bool = False
    up_bytes: int = 0
    down_bytes: int = 0
    version: int = 0
    staleness: list[int] = field(default_factory=list)
    refused: int = 0
    seconds: float = 0.0
    state: dict[str, numpy.typing.NDArray[numpy.float32]] = field(default_factory=dict)


def work(connection: Connection, spec: Spec, worker: int, address: str) -> None:
    """Join, say so, wait for the word, train, leave, and tell.

    Args:
        connection: to the comparison.
        spec: the run.
        worker: number of this one.
        address: of the server; empty where there is none.
    """
    task, method = TASKS[spec.task], METHODS[spec.method]
    model = task.initial_model(spec.seed)
    draws = task.draws(spec.seed, worker, spec.workers)
    setup = Setup(
        model,
        spec.learning_rate,
        spec.momentum,
        spec.density,
        spec.steps,
        spec.workers,
        connection_to(address, worker) if address else {},
    )
    optimizer, scheduled = method.make(setup)
    schedule = _decay(scheduled, spec.steps) if scheduled is not None else None
    served = optimizer if isinstance(optimizer, ParameterServerOptimizer) else None
    downloaded = served.totals.pull_bytes if served is not None else 0
    told = Told()
    connection.send("ready")
    connection.recv()
    started = time.perf_counter()
    try:
        for _ in range(spec.steps):
            optimizer.zero_grad()
            loss = loss_of(model, next(draws))
            if not math.isfinite(loss.item()):
                told.diverged = True
                break
            torch.autograd.backward(loss)
            clip(model)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            if served is not None:
                told.staleness.append(served.report.staleness)
    except NonFiniteGradientError:
        told.diverged = True
    if served is None:
        told.state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
        told.version = spec.steps
    else:
        served.close()
        told.version = served.version
        told.up_bytes, told.down_bytes = served.totals.push_bytes, served.totals.pull_bytes - downloaded
        told.refused = served.totals.refused
    told.seconds = time.perf_counter() - started
    connection.send(told)


def clip(model: torch.nn.Module) -> None:
    """Bound the norm of a gradient: a stale step too far is then a setback, and not the end of a run."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM, error_if_nonfinite=False)


def connection_to(address: str, worker: int) -> dict[str, object]:
    """Return how an optimizer reaches its server; loopback stands for a slow network, so indices are packed tightly."""
    settings = client_settings.load(
        index_codec="rice",
        connect_seconds=CALL_SECONDS,
        deadline_seconds=CALL_SECONDS,
        patience_seconds=CALL_SECONDS,
        flush_on_sigterm=False,
    )
    return {"server": address, "worker": f"worker-{worker}", "settings": settings}


def _decay(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Raise the rate over the first tenth of the steps, then let it fall to zero along a cosine."""
    rise = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        return (1 + math.cos(math.pi * (step - rise) / (steps - rise))) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

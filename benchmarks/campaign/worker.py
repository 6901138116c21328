"""One worker of a run: an ordinary training loop, and what is counted beside it."""

import functools
import math
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy
import numpy.typing
import torch
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.campaign.methods import METHODS, Setup
from benchmarks.campaign.spec import Form, Spec
from benchmarks.campaign.tasks import TASKS, loss_of
from psclient import settings as client_settings
from psclient.errors import NonFiniteGradientError
from psclient.optim.base import ParameterServerOptimizer

CALL_SECONDS = 60.0
"""Longest wait of a worker for its server."""
LARGEST_NORM = 1.0
"""Of the gradient that a worker hands to its method."""
_CURVE_SAMPLES = 2000


@dataclass(slots=True)
class Told:
    """What a worker tells at its end.

    Attributes:
        diverged: a loss or a gradient was not finite, and training ended there.
        curve: of its model on the way: steps, bytes up and down, and the score.
        state: the trained weights; of a single node alone, others have them on the server.
    """

    diverged: bool = False
    up_bytes: int = 0
    down_bytes: int = 0
    version: int = 0
    staleness: list[int] = field(default_factory=list)
    refused: int = 0
    seconds: float = 0.0
    curve: list[tuple[int, int, int, float]] = field(default_factory=list)
    state: dict[str, numpy.typing.NDArray[numpy.float32]] = field(default_factory=dict)


class Trainee:
    """A worker that has joined: it computes gradients, steps, and tells what it saw.

    Args:
        spec: the run.
        worker: number of this one.
        address: of the server; empty where there is none.
    """

    def __init__(self, spec: Spec, worker: int, address: str) -> None:
        task = TASKS[spec.task]
        self.told = Told()
        self._task, self._spec, self._steps = task, spec, 0
        self._model = task.initial_model(spec.seed)
        self._draws = task.draws(spec.seed, worker, spec.workers)
        setup = Setup(
            self._model,
            spec.learning_rate,
            spec.momentum,
            spec.form.size,
            spec.steps,
            spec.workers,
            connection_to(address, worker, spec.form) if address else {},
        )
        self._optimizer, scheduled = METHODS[spec.method].make(setup)
        factor = functools.partial(decay, steps=spec.steps)
        self._schedule = LambdaLR(scheduled, factor) if scheduled is not None else None
        self._served = self._optimizer if isinstance(self._optimizer, ParameterServerOptimizer) else None
        self._downloaded = self._served.totals.pull_bytes if self._served is not None else 0
        points = spec.points if worker == 0 else 0
        self._measured = {spec.steps * (point + 1) // points for point in range(points)}
        self._kept: list[tuple[int, int, int, dict[str, torch.Tensor]]] = []
        self._started = time.perf_counter()

    def start(self) -> None:
        """The clock runs from here on."""
        self._started = time.perf_counter()

    def gradient(self) -> None:
        """Compute the gradient of the next batch."""
        self._optimizer.zero_grad()
        served = self._served if METHODS[self._spec.method].ahead else None
        with nullcontext() if served is None else served.lookahead():
            loss = loss_of(self._model, next(self._draws))
            if not math.isfinite(loss.item()):
                self.told.diverged = True
                return
            torch.autograd.backward(loss)
        clip(self._model)

    def step(self) -> None:
        """Hand the gradient in, and take what comes back."""
        try:
            self._optimizer.step()
        except NonFiniteGradientError:
            self.told.diverged = True
            return
        if self._schedule is not None:
            self._schedule.step()
        if self._served is not None:
            self.told.staleness.append(self._served.report.staleness)
        self._steps += 1
        if self._steps in self._measured:
            state = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
            self._kept.append((self._steps, *self._bytes(), state))

    def end(self) -> Told:
        """Leave, and tell."""
        told, served = self.told, self._served
        if served is None:
            told.state = {name: tensor.numpy() for name, tensor in self._model.state_dict().items()}
            told.version = self._spec.steps
        else:
            served.close()
            told.version, told.refused = served.version, served.totals.refused
            told.up_bytes, told.down_bytes = self._bytes()
        told.seconds = time.perf_counter() - self._started
        model = self._task.make_model() if self._kept else self._model
        for steps, up, down, state in self._kept:
            model.load_state_dict(state)
            quality = self._task.evaluate(model, self._spec.validation, most=_CURVE_SAMPLES)
            told.curve.append((steps, up, down, quality.of(self._task.metric)))
        return told

    def _bytes(self) -> tuple[int, int]:
        if self._served is None:
            return 0, 0
        return self._served.totals.push_bytes, self._served.totals.pull_bytes - self._downloaded


def work(connection: Connection, spec: Spec, worker: int, address: str) -> None:
    """Join, say so, wait for the word, train at the run's pace, leave, and tell; see :class:`Trainee`."""
    trainee = Trainee(spec, worker, address)
    connection.send("ready")
    connection.recv()
    trainee.start()
    for _ in range(spec.steps):
        due = time.perf_counter() + spec.pace
        trainee.gradient()
        time.sleep(max(0.0, due - time.perf_counter()))
        if not trainee.told.diverged:
            trainee.step()
        if trainee.told.diverged:
            break
    connection.send(trainee.end())


def take_turns(connection: Connection, spec: Spec, address: str) -> None:
    """Be all workers of a run, in an order drawn anew for each round; every worker is as stale as every other.

    Where a method's workers wait for one another, they step at once.
    """
    trainees = [Trainee(spec, number, address) for number in range(spec.workers)]
    for trainee in trainees:
        trainee.start()
    draw = random.Random(spec.seed)
    with ThreadPoolExecutor(spec.workers) as threads:
        for _ in range(spec.steps):
            if METHODS[spec.method].waits:
                for trainee in trainees:
                    trainee.gradient()
                if not any(trainee.told.diverged for trainee in trainees):
                    list(threads.map(Trainee.step, trainees))
            else:
                for trainee in draw.sample(trainees, len(trainees)):
                    trainee.gradient()
                    if not trainee.told.diverged:
                        trainee.step()
            if any(trainee.told.diverged for trainee in trainees):
                break
        connection.send(list(threads.map(Trainee.end, trainees)))


def clip(model: torch.nn.Module) -> None:
    """Bound the norm of a gradient: a stale step too far is then a setback, and not the end of a run."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM, error_if_nonfinite=False)


def connection_to(address: str, worker: int, form: Form) -> dict[str, object]:
    """Return how an optimizer reaches its server; loopback stands for a slow network, so indices are packed tightly."""
    settings = client_settings.load(
        index_codec="rice",
        value_type=form.values,
        residual_type=form.residuals,
        connect_seconds=CALL_SECONDS,
        deadline_seconds=CALL_SECONDS,
        patience_seconds=CALL_SECONDS,
        flush_on_sigterm=False,
    )
    return {"server": address, "worker": f"worker-{worker}", "settings": settings}


def decay(step: float, steps: int) -> float:
    """Return the factor of the rate: it rises over the first tenth of the steps, then falls to zero along a cosine."""
    rise = max(1, steps // 10)
    if step < rise:
        return (step + 1) / rise
    return (1 + math.cos(math.pi * (step - rise) / (steps - rise))) / 2

"""One worker of a run: a training loop whose steps last as long as asked for, and what is counted beside it."""

import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

import psclient
from benchmarks.campaign.methods import METHODS, Setup
from benchmarks.campaign.spec import Form
from benchmarks.campaign.tasks import TASKS, loss_of
from benchmarks.campaign.worker import clip, connection_to, decay
from benchmarks.network.lab import enter
from benchmarks.rivals.contenders import CONTENDERS, DENSE_STEPS, PERIOD
from psclient.optim.base import ParameterServerOptimizer

BUDGET = Form(budget=0.03)


@dataclass(frozen=True, slots=True)
class Job:
    """What all workers of a run do.

    Attributes:
        task: key of the task.
        contender: key of the contender.
        inner: key of the rival's optimizer; empty for a method of this library.
        rate: effective, before the scale of the method or optimizer.
        workers: how many.
        seed: of the weights and of the data.
        samples: of all workers together.
        steps: that each worker makes at most, of those that the samples are; for the time of a step alone.
        pace: seconds that a step lasts at least, without the network.
        slowness: what the last worker's pace is multiplied by.
        validation: the loss is measured on the data to choose settings by.
        lost_at: steps after which the last worker's process dies; 0 where none is lost.
        back_at: of a rival: steps after which another worker joins.
    """

    task: str
    contender: str
    inner: str
    rate: float
    workers: int
    seed: int
    samples: int
    steps: int
    pace: float = 0.0
    slowness: float = 1.0
    validation: bool = False
    lost_at: int = 0
    back_at: int = 0

    @property
    def all_steps(self) -> int:
        """Steps of each worker for all samples."""
        return self.samples // (TASKS[self.task].batch_size * self.workers)


class Moment(NamedTuple):
    """Where a worker is at the end of a step; at first, where it starts.

    Attributes:
        seconds: from the start.
        up: bytes that have left its card, headers included.
        down: bytes that have come to it.
    """

    seconds: float = 0.0
    up: int = 0
    down: int = 0


@dataclass(slots=True)
class Told:
    """What a worker tells at its end.

    Attributes:
        steps: that it has made.
        begun: after its first :data:`~benchmarks.rivals.contenders.DENSE_STEPS` steps; zeros if it made fewer.
        ended: after its last.
        curve: steps, seconds and loss of its model on the way; of the first worker alone.
        final: loss of the model at the end; of the first worker alone.
    """

    steps: int = 0
    begun: Moment = field(default_factory=Moment)
    ended: Moment = field(default_factory=Moment)
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    final: float = math.inf

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Self:
        """Return it from what ``asdict`` and JSON have made of it."""
        moments = {name: Moment(*plain[name]) for name in ("begun", "ended")}
        return cls(**{**plain, **moments})

    @property
    def usual_seconds(self) -> float:
        """Mean time of the steps behind the first ones."""
        return (self.ended.seconds - self.begun.seconds) / (self.steps - DENSE_STEPS)


class Loop:
    """What both kinds of workers have in common: model, data, pace, clock, counters."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.told = job, rank, Told()
        self._task = TASKS[job.task]
        self.model = self._task.initial_model(job.seed)
        self._draws = self._task.draws(job.seed, rank, job.workers)
        self._pace = job.pace * (job.slowness if rank == job.workers - 1 else 1.0)
        self._kept: list[tuple[int, float, dict[str, torch.Tensor]]] = []
        self._due = self._started = 0.0
        self._before = (0, 0)

    def start(self, connection: Connection) -> None:
        """Wait for the word; the clock runs from then on."""
        connection.send("ready")
        connection.recv()
        self._before, self._started = _card_bytes(), time.perf_counter()

    def gradient(self, model: torch.nn.Module) -> None:
        """Compute the gradient of the next batch; whoever sends it waits for the pace first."""
        self._due = time.perf_counter() + self._pace
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(loss_of(model, next(self._draws)))

    def wait(self) -> None:
        """Sleep until the step has lasted as long as it must."""
        time.sleep(max(0.0, self._due - time.perf_counter()))

    def die_if_due(self, steps: int) -> None:
        """End at once, as a machine that is lost does, where so many steps are this worker's last."""
        if steps == self.job.lost_at and self.rank == self.job.workers - 1 and steps:
            os.kill(os.getpid(), signal.SIGKILL)

    def stepped(self) -> None:
        """Note the time, and the first worker's model from time to time."""
        told, (sent, received) = self.told, _card_bytes()
        told.steps += 1
        told.ended = Moment(time.perf_counter() - self._started, sent - self._before[0], received - self._before[1])
        if told.steps == DENSE_STEPS:
            told.begun = told.ended
        if self.rank == 0 and told.steps % PERIOD == 0 and self.job.steps == self.job.all_steps:
            state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            self._kept.append((told.steps, told.ended.seconds, state))

    def end(self, final: Callable[[], dict[str, torch.Tensor]]) -> Told:
        """Measure what was kept, and the model at the end."""
        model = self._task.make_model()
        if self._kept:
            for steps, seconds, state in [*self._kept, (0, 0.0, final())]:
                model.load_state_dict(state)
                loss = self._task.evaluate(model, self.job.validation).loss
                self.told.curve.append((steps, round(seconds, 3), round(loss, 5)))
            self.told.final = self.told.curve.pop()[2]
        return self.told


def serve_and_train(connection: Connection, job: Job, rank: int, space: str, address: str) -> None:
    """Be a worker of this library: the run is over when the server has all pushes or rounds, whoever sent them."""
    if space:
        enter(space)
    loop, contender = Loop(job, rank), CONTENDERS[job.contender]
    method = METHODS[contender.method]
    if contender.overlap:  # before the optimizer's own hooks: nothing is sent before its time
        for parameter in loop.model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: loop.wait())  # type: ignore[no-untyped-call]
    setup = Setup(
        loop.model,
        job.rate * method.rate_scale,
        0.0,
        BUDGET.size,
        job.all_steps,
        job.workers,
        {**connection_to(address, rank, Form()), **contender.options(job.workers)},
    )
    optimizer, scheduled = method.make(setup)
    assert isinstance(optimizer, ParameterServerOptimizer)
    assert scheduled is not None
    highest = scheduled.param_groups[0]["lr"]
    versions_a_step = job.workers if contender.rounds is None else 1
    loop.start(connection)
    while (steps := optimizer.version / versions_a_step) < job.all_steps:
        for group in scheduled.param_groups:
            group["lr"] = highest * decay(steps, job.all_steps)
        loop.gradient(loop.model)
        if not contender.overlap:
            clip(loop.model)
            loop.wait()
        optimizer.step()
        loop.stepped()
        loop.die_if_due(loop.told.steps)
    optimizer.close()
    connection.send(loop.end(lambda: psclient.download(address)))


def _card_bytes() -> tuple[int, int]:
    """Return the bytes that this host's cards, loopback aside, have sent and received."""
    sent = received = 0
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, counts = line.partition(":")
        if name.strip() != "lo":
            received, sent = received + int(counts.split()[0]), sent + int(counts.split()[8])
    return sent, received

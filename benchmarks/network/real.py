"""Real workers and a real server over a real, shaped network, with a compute time that is slept."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import fmean

import torch

import psclient
from benchmarks.harness.children import Child
from benchmarks.network.costs import Curve
from benchmarks.network.lab import Lab, enter, inside
from benchmarks.network.model import BACKWARD, mean_step
from benchmarks.workload.synthetic import Noise, SyntheticModel
from psclient.optim.base import ParameterServerOptimizer
from psclient.rpc.local_server import LocalServer
from psclient.settings import ClientSettings
from pscore.model.layout import ModelLayout, TensorSpec

_WARM_STEPS = 2
_START_SECONDS, _STEP_SECONDS, _CALL_SECONDS = 60.0, 30.0, 60.0
_SERVER = 0  # its host; workers have the next ones
_TENSORS = 8
_GROUP_ELEMENTS = 200_000  # a tenth of the default, as the model is a tenth


@dataclass(frozen=True, slots=True)
class Point:
    """One experiment.

    Attributes:
        curve: how they train.
        workers: how many.
        compute: seconds of a step that are slept.
        steps: of each worker, warm-up apart.
    """

    curve: Curve
    workers: int
    compute: float
    steps: int


def layout_of(size: int) -> ModelLayout:
    """Return a model of a few equal tensors."""
    return ModelLayout(tuple(TensorSpec(f"layer{i}", (size // _TENSORS,), torch.float32) for i in range(_TENSORS)))


def step_seconds(lab: Lab, point: Point, layout: ModelLayout, density: float, seed: int) -> float:
    """Return a worker's time for a step while all of them train.

    Raises:
        ChildFailedError: a worker failed or did not answer in time.
        SparsepsError: the server did not come up.
    """
    down = "topk" if point.curve.down == "topk" else "exact"

    def serve() -> LocalServer:
        listen = f"{lab.address(_SERVER)}:0"
        return LocalServer(
            listen=listen,
            insecure=True,
            buffers="none",
            down_mode=down,
            down_density=density,
            down_value_type=point.curve.value_type,
        )

    with ExitStack() as stack:
        server = stack.enter_context(inside(lab.space(_SERVER), serve))
        workers = [
            stack.enter_context(
                Child(f"worker {i}", _work, lab.space(1 + i), server.server, point, layout, density, seed + i)
            )
            for i in range(point.workers)
        ]
        for worker in workers:
            worker.hear(_START_SECONDS)
        for worker in workers:
            worker.tell()
        ends: list[list[float]] = [worker.hear(point.steps * _STEP_SECONDS) for worker in workers]
    return _together(ends)


def _together(ends: Sequence[Sequence[float]]) -> float:
    """Return the mean time of a step while every worker was at work."""
    last = min(moments[-1] for moments in ends)
    return fmean(mean_step([moment for moment in moments if moment <= last]) for moments in ends)


def _work(
    connection: Connection, space: str, server: str, point: Point, layout: ModelLayout, density: float, seed: int
) -> None:
    enter(space)
    model = SyntheticModel(layout)
    compute = _Compute(model, Noise(layout, seed), point.compute)
    with _optimizer(model, point.curve, density, server, f"worker-{seed}") as optimizer:
        for _ in range(_WARM_STEPS):
            compute.backward()
            optimizer.step()
        connection.send("ready")
        connection.recv()
        ends = [time.monotonic()]
        for _ in range(point.steps):
            compute.backward()
            optimizer.step()
            ends.append(time.monotonic())
        connection.send(ends)


def _optimizer(model: SyntheticModel, curve: Curve, density: float, server: str, name: str) -> ParameterServerOptimizer:
    settings = ClientSettings.model_validate(
        {
            "server": server,
            "worker": name,
            "value_type": curve.value_type,
            "merge": "elements",  # the model has equal groups
            "group_elements": _GROUP_ELEMENTS,
            "deadline_seconds": _CALL_SECONDS,
            "patience_seconds": _CALL_SECONDS,
        }
    )
    if curve.down == "dense":
        return psclient.ASGD(model.parameters(), lr=0.01, model=model, settings=settings)
    return psclient.DGS(
        model.parameters(),
        lr=0.01,
        momentum=0.3,
        density=density,
        model=model,
        overlap=curve.overlap,
        settings=settings,
    )


class _Compute:
    """A forward and a backward pass that take their time asleep; gradients of noise arrive one after the other."""

    def __init__(self, model: SyntheticModel, noise: Noise, seconds: float) -> None:
        self._model, self._noise, self._seconds = model, noise, seconds
        self._moments = self._due()
        for parameter in model.parameters():
            # Before the optimizer's own hooks, which then see each gradient at its time.
            parameter.register_post_accumulate_grad_hook(lambda _: _sleep_until(next(self._moments)))
        self._gradients = [torch.empty_like(parameter) for parameter in model.parameters()]

    def backward(self) -> None:
        """Leave a gradient in every parameter."""
        self._moments = self._due()
        _sleep_until(next(self._moments))
        for gradient, parameter in zip(self._gradients, self._model.parameters(), strict=True):
            gradient.copy_(self._noise.like(parameter))
            parameter.grad = None
        pairs = zip(self._gradients, self._model.parameters(), strict=True)
        torch.stack([(gradient * parameter).sum() for gradient, parameter in pairs]).sum().backward()

    def _due(self) -> Iterator[float]:
        """Yield the end of the forward pass, then the moment of each gradient, last layer first."""
        started, forward = time.monotonic(), (1 - BACKWARD) * self._seconds
        yield started + forward
        done, size = 0, sum(parameter.numel() for parameter in self._model.parameters())
        for parameter in reversed(list(self._model.parameters())):
            done += parameter.numel()
            yield started + forward + BACKWARD * self._seconds * done / size


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))

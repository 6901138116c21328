"""A backward pass that takes its time asleep: gradients of noise, each at its moment."""

import time
from collections.abc import Iterator, Sequence

import torch

from benchmarks.workload.synthetic import Noise, SyntheticModel


class SleepingBackward:
    """Leaves gradients in a model, last tensor first.

    Args:
        model: whose gradients.
        noise: what they are.
        work: of each tensor, in any unit, in the order of the layout.
        seconds: of the whole pass.
    """

    def __init__(self, model: SyntheticModel, noise: Noise, work: Sequence[float], seconds: float) -> None:
        """Hook every parameter; make this before the optimizer, whose hooks then see each gradient at its time."""
        self._model, self._noise = model, noise
        total = sum(work)
        self._offsets, done = [], 0.0
        for each in reversed(work):
            done += each
            self._offsets.append(seconds * done / total)
        self._moments: Iterator[float] = iter(())
        self._gradients = [torch.empty_like(parameter) for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: _sleep_until(next(self._moments)))

    def run(self) -> None:
        """Take one pass; the noise is drawn before it begins."""
        parameters = list(self._model.parameters())
        for gradient, parameter in zip(self._gradients, parameters, strict=True):
            gradient.copy_(self._noise.like(parameter))
            parameter.grad = None
        losses = [_Loss.apply(parameter, each) for parameter, each in zip(parameters, self._gradients, strict=True)]
        loss = torch.stack(losses).sum()
        started = time.perf_counter()
        self._moments = iter([started + offset for offset in self._offsets])
        loss.backward()


class _Loss(torch.autograd.Function):
    """A loss whose gradient is given: backward computes nothing."""

    @staticmethod
    def forward(context: torch.autograd.function.FunctionCtx, *given: torch.Tensor) -> torch.Tensor:
        context.gradient = given[1]  # type: ignore[attr-defined]
        return torch.zeros(())

    @staticmethod
    def backward(context: torch.autograd.function.FunctionCtx, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return context.gradient.clone(), None  # type: ignore[attr-defined]


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.perf_counter()))

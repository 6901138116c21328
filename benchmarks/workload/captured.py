"""A real training run in this process, and what its steps select: what no generator of noise can stand for."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from benchmarks.peers.task import batches, make_model
from benchmarks.workload.residual import Residual
from pscore.selection import SELECTORS, SelectFunction, entries_for

_RATE, _MOMENTUM = 0.05, 0.7
_DROPS = (0.5, 0.8)
"""Parts of a run after which the learning rate falls to a tenth."""

_DENSE_BELOW = 4096


Residuals = dict[int, Residual]
"""Those of one worker, by the number of the parameter; made at the first push."""


@dataclass
class Run:
    """What a run left.

    Attributes:
        ratios: k̂/k of every selection with k of 10 or more, in order.
        supports: selected offsets of some steps, and how many elements there were; tensors laid end to end.
        values: what was selected, for each of these.
        loss: at the end.
    """

    ratios: list[float] = field(default_factory=list)
    supports: list[tuple[np.ndarray, int]] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    loss: float = 0.0


def convnet(seed: int) -> nn.Sequential:
    """Return a small convolutional network for digits: 0.6 million parameters, most of them in convolutions."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(128, 256, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


MODELS = {"perceptron": make_model, "convolutional": convnet}


def train(model: nn.Module, density: float, steps: int, seed: int, selector: str, *, keep_every: int) -> Run:
    """Train with DGS on one worker: what is selected is what the model moves by.

    Args:
        model: is trained.
        density: of a push.
        steps: of the run; the learning rate falls twice.
        seed: of the batches.
        selector: by name.
        keep_every: steps between two whose supports are kept.
    """
    run = Run()
    residuals: Residuals = {}
    draws = batches(seed)
    for step in range(steps):
        rate = _RATE * 0.1 ** sum(step >= part * steps for part in _DROPS)
        x, y = next(draws)
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        sent = push(list(model.parameters()), residuals, rate, density, SELECTORS[selector], run)
        if step % keep_every == keep_every - 1:
            _keep(run, sent, [p.numel() for p in model.parameters()])
        run.loss = loss.item()
    return run


@torch.no_grad()
def push(
    parameters: Sequence[torch.Tensor],
    residuals: Residuals,
    rate: float,
    density: float,
    selector: SelectFunction | None,
    run: Run,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Accumulate gradients, select, and apply, as DGS does; return offsets and values by parameter."""
    sent = []
    for position, parameter in enumerate(parameters):
        assert parameter.grad is not None
        n = parameter.numel()
        k = n if n < _DENSE_BELOW else entries_for(n, density)
        if position not in residuals:
            residuals[position] = Residual(torch.zeros(n), k, selector, _MOMENTUM)
        count = residuals[position].step(parameter.grad.contiguous(), rate)
        if n >= _DENSE_BELOW and k >= 10:
            run.ratios.append(count / k)
        offsets, values = residuals[position].taken
        parameter.view(-1)[offsets] -= values
        sent.append((offsets, values))
    return sent


def _keep(run: Run, sent: Sequence[tuple[torch.Tensor, torch.Tensor]], sizes: Sequence[int]) -> None:
    """Keep what the large tensors have sent, end to end as in a push."""
    offsets, values, start = [], [], 0
    for (where, what), size in zip(sent, sizes, strict=True):
        if size < _DENSE_BELOW:
            continue
        offsets.append(where.numpy() + start)
        values.append(what.numpy())
        start += size
    run.supports.append((np.concatenate(offsets), start))
    run.values.append(np.concatenate(values))

"""Gradients and residuals of a real training run, with model, data and augmentation of ``examples/cifar10.py``."""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.workload.residual import Residual
from pscore.selection import DEFAULT_DENSE_BELOW, entries_for

_EXAMPLES = Path(__file__).parent.parent.parent / "examples"
RATE, MOMENTUM, WEIGHT_DECAY, DENSITY = 0.05, 0.7, 5e-4, 0.01


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of a run, just before entries are selected. All tensors are flat.

    Attributes:
        step: counted from 1.
        loss: of the batch.
        names: of the model's parameters, in order.
        gradients: of the batch, by parameter.
        memories: DGS's residuals, to which this step's gradients times :data:`RATE` are not added yet.
    """

    step: int
    loss: float
    names: list[str]
    gradients: list[torch.Tensor]
    memories: list[torch.Tensor]

    def accumulated(self) -> list[torch.Tensor]:
        """Return what the step selects from (weight decay, which is next to nothing in one step, left out)."""
        return [memory + RATE * gradient for memory, gradient in zip(self.memories, self.gradients, strict=True)]


def example() -> Any:
    """Return ``examples/cifar10.py`` as a module.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
    """
    if importlib.util.find_spec("torchvision") is None:
        raise ModuleNotFoundError("torchvision is needed: pip install 'sparseps[examples]'")
    if str(_EXAMPLES) not in sys.path:
        sys.path.insert(0, str(_EXAMPLES))
    return importlib.import_module("cifar10")


def training_images(dataset: str, data: Path | None, made: Path) -> Dataset[Any]:
    """Return CIFAR's training images with the example's augmentation.

    Args:
        dataset: ``cifar10`` or ``cifar100``.
        data: the folder where torchvision keeps it; ``None`` makes small data in the same format, of digits.
        made: where to.
    """
    scripts = example()
    md5s = None
    if data is None:
        small = importlib.import_module("support.smalldata")
        data = {"cifar10": small.write_cifar10, "cifar100": small.write_cifar100}[dataset](made / dataset)
        md5s = data / "md5sums.txt"
    options = argparse.Namespace(dataset=dataset, data=data, md5s=md5s, download=False)
    return scripts.load_data(options, train=True)  # type: ignore[no-any-return]


def moments(
    model: nn.Module, images: Dataset[Any], batch_size: int, steps: Iterable[int], seed: int, device: torch.device
) -> Iterator[Moment]:
    """Train with DGS on one worker, selecting as the library does, and yield the steps asked for.

    Args:
        model: is trained.
        images: and their labels.
        batch_size: of a step.
        steps: numbers of those to yield, from 1 on; the last one ends the run.
        seed: of the order of the images.
        device: to train on.
    """
    wanted = set(steps)
    model.to(device).train()
    names, parameters = zip(*model.named_parameters(), strict=True)
    memories = [torch.zeros(p.numel(), device=device) for p in parameters]
    wanted_of = [n if n < DEFAULT_DENSE_BELOW else entries_for(n, DENSITY) for n in map(torch.Tensor.numel, memories)]
    residuals = [Residual(memory, k, None, MOMENTUM) for memory, k in zip(memories, wanted_of, strict=True)]
    batches = _batches(images, batch_size, seed)
    for step in range(1, max(wanted) + 1):
        inputs, labels = next(batches)
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
        loss.backward()
        gradients = [p.grad.reshape(-1) for p in parameters]
        if step in wanted:
            yield Moment(step, loss.item(), list(names), gradients, [memory.clone() for memory in memories])
        with torch.no_grad():
            for parameter, gradient, residual in zip(parameters, gradients, residuals, strict=True):
                flat = parameter.view(-1)
                residual.step(gradient, RATE, flat, RATE * WEIGHT_DECAY)
                offsets, values = residual.taken
                flat[offsets.to(device)] -= values.to(device)


def _batches(images: Dataset[Any], batch_size: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(seed)  # of the augmentation
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(images, batch_size, shuffle=True, drop_last=True, generator=generator)
    while True:
        yield from loader

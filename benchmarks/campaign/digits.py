"""The digits of scikit-learn and a small CNN: a task that a single node nearly solves."""

import functools
from collections.abc import Iterator

import torch
from torch import nn

TEST_SAMPLES = 500
"""One of them is 0.2 % of accuracy."""
VALIDATION_SAMPLES = 200
_HELD_OUT = TEST_SAMPLES + VALIDATION_SAMPLES


def make_model() -> nn.Module:
    """Return a CNN of 38,282 parameters, without BatchNorm: its statistics would be another difference to explain."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def batches(batch_size: int, seed: int, worker: int, workers: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of a worker's share of the training images, pass after pass, shuffled anew for each."""
    images, labels = _data()
    share = torch.arange(_HELD_OUT + worker, len(labels), workers)
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = share[torch.randperm(len(share), generator=generator)]
        for start in range(0, len(order) - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            yield images[chosen], labels[chosen]


def held_out(validation: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images to test with, or those to choose settings by."""
    images, labels = _data()
    part = slice(TEST_SAMPLES, _HELD_OUT) if validation else slice(TEST_SAMPLES)
    return images[part], labels[part]


def source() -> str:
    trained = len(_data()[1]) - _HELD_OUT
    return (
        f"scikit-learn's digits: {trained} images to train on, {VALIDATION_SAMPLES} to choose settings by, "
        f"{TEST_SAMPLES} to test with"
    )


@functools.cache
def _data() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(images).float().view(-1, 1, 8, 8)[order] / 16, torch.from_numpy(labels).long()[order]

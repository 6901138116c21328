"""Fashion-MNIST and small residual networks, with group norms: batch norms' statistics would be a second question."""

import functools
from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.campaign import fetch

_TEST, _VALIDATION = 1000, 500  # images of each class
_PAD = 2


class Block(nn.Module):
    """Two convolutions around which the input goes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.way = nn.Sequential(
            *(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.GroupNorm(8, after), nn.ReLU()),
            *(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.GroupNorm(8, after)),
        )
        self.around = nn.Identity() if stride == 1 and before == after else nn.Conv2d(before, after, 1, stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.way(images) + self.around(images))


def make_model() -> nn.Module:
    """Return a network of 14 layers and 700,000 parameters."""
    return _network((32, 64, 128), 2, stride=1)


def make_tiny() -> nn.Module:
    """Return a network of 8 layers and 170,000 parameters, which sees a quarter of the pixels."""
    return _network((16, 32, 96), 1, stride=2)


def batches(batch_size: int, seed: int, worker: int, workers: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of a worker's share, pass after pass, each image shifted by up to two pixels and maybe mirrored."""
    images, labels = _part(0)
    share = torch.arange(worker, len(labels), workers)
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = share[torch.randperm(len(share), generator=generator)]
        for start in range(0, len(order) - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            yield _varied(images[chosen], generator), labels[chosen]


def held_out(validation: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images to test with, or those to choose settings by."""
    images, labels = _part(2 if validation else 1)
    return _scaled(images), labels


def source() -> str:
    return (
        f"Fashion-MNIST: {len(_part(0)[1])} images to train on, {len(_part(2)[1])} to choose settings by, "
        f"{len(_part(1)[1])} to test with (of each class the last; not the published split)"
    )


def is_here() -> bool:
    return fetch.is_here("fashion-mnist.pt")


def _network(widths: tuple[int, ...], blocks: int, stride: int) -> nn.Module:
    first = nn.Conv2d(1, widths[0], 3, stride, 1, bias=False)
    layers: list[nn.Module] = [first, nn.GroupNorm(8, widths[0]), nn.ReLU()]
    before = widths[0]
    for level, after in enumerate(widths):
        for number in range(blocks):
            layers.append(Block(before, after, 2 if level and not number else 1))
            before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


@functools.cache
def _part(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images and labels to train on (0), to test with (1), to choose by (2), in an order of chance."""
    classes = fetch.fashion()
    count = classes.shape[1]
    ends = (0, count - _TEST - _VALIDATION), (count - _TEST, count), (count - _TEST - _VALIDATION, count - _TEST)
    chosen = classes[:, slice(*ends[number])]
    labels = torch.arange(len(classes)).repeat_interleave(chosen.shape[1])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return chosen.reshape(-1, *chosen.shape[2:])[order], labels[order]


def _scaled(images: torch.Tensor) -> torch.Tensor:
    return (images.float().unsqueeze(1) - 73) / 90


def _varied(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    count, side = len(images), images.shape[-1]
    wide = nn.functional.pad(images, (_PAD,) * 4)
    down, right = torch.randint(2 * _PAD + 1, (2, count, 1), generator=generator)
    along = torch.arange(side)
    columns = torch.where(torch.rand(count, 1, generator=generator) < 0.5, along, along.flip(0)) + right
    return _scaled(wide[torch.arange(count)[:, None, None], (down + along)[:, :, None], columns[:, None, :]])

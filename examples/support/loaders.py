"""Batches for a classifier of images, whoever decodes them: the samples are a sampler's, in the order it draws them."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

import psclient

from .datafiles import DamagedDataError
from .images import Images, decode
from .vision import torchvision

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's pixels, from 0 to 1."""
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""What a training image is cut out of a photograph: its share of the area, and width by height."""

Batch = tuple[torch.Tensor, torch.Tensor]


class Loader(Protocol):
    """Yields images, normalised, N by 3 by size by size, and their labels."""

    def __iter__(self) -> Iterator[Batch]:
        """Make a pass over what the sampler draws."""


def shorter_side(size: int) -> int:
    """Return what the shorter side is scaled to before the middle is cut out for validation: 256 for 224."""
    return size + 2 * round(size / 14)


def choose(name: str | None) -> str:
    """Return the loader to take, DALI where it can be imported.

    Raises:
        ConfigurationError: DALI is asked for, and not there.
    """
    if name == "torchvision":
        return name
    try:
        import nvidia.dali  # noqa: F401
    except ImportError as error:
        if name is None:
            return "torchvision"
        raise psclient.errors.ConfigurationError(
            f"DALI cannot be imported ({error}): pip install -c constraints.txt '.[examples]', "
            "or take --loader torchvision"
        ) from error
    return "dali"


def make_loader(
    name: str,
    images: Images,
    sampler: Iterable[int],
    *,
    training: bool,
    batch_size: int,
    size: int,
    workers: int,
    device: torch.device,
    seed: int = 0,
) -> Loader:
    """Make a loader.

    Args:
        name: ``dali`` or ``torchvision``.
        images: the dataset.
        sampler: draws the samples of a pass.
        training: whether images are cut out and flipped at random.
        batch_size: the last batch of a pass may be smaller.
        size: of the square images that come out.
        workers: threads of DALI, or processes of torchvision's.
        device: that trains; with DALI, GPUs decode, and the images are there already.
        seed: of what is random in DALI; torchvision takes torch's.
    """
    if name == "dali":
        from .dali import DaliLoader

        return DaliLoader(images, sampler, training, batch_size, size, workers, device, seed)
    return TorchvisionLoader(images, sampler, training, batch_size, size, workers, device)


class TorchvisionLoader:
    """Pillow and torchvision's transforms in the processes of a ``DataLoader``; arguments as :func:`make_loader`."""

    def __init__(
        self,
        images: Images,
        sampler: Iterable[int],
        training: bool,
        batch_size: int,
        size: int,
        workers: int,
        device: torch.device,
    ) -> None:
        """Prepare; processes start with the first pass and stay."""
        self._loader: DataLoader[Any] = DataLoader(
            _Decoded(images, _transform(training, size)),
            batch_size,
            sampler=sampler,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
            multiprocessing_context="spawn" if workers else None,  # gRPC and DALI have threads, which no fork survives
        )

    def __iter__(self) -> Iterator[Batch]:
        """Make a pass; raises ``DamagedDataError`` where an image cannot be decoded."""
        try:
            yield from self._loader
        except DamagedDataError as error:  # a process of the loader adds its traceback
            raise DamagedDataError(str(error).rstrip().rpartition("DamagedDataError: ")[2]) from None


class _Decoded(Dataset[tuple[torch.Tensor, int]]):
    """Images, decoded and transformed."""

    def __init__(self, images: Images, transform: nn.Module) -> None:
        self._images, self._transform = images, transform

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        data, label = self._images.read(index)
        return self._transform(decode(data, self._images.name(index))), label


def _transform(training: bool, size: int) -> nn.Module:
    v2 = torchvision.transforms.v2
    if training:
        steps = [v2.RandomResizedCrop(size, AREA, RATIO, antialias=True), v2.RandomHorizontalFlip()]
    else:
        steps = [v2.Resize(shorter_side(size), antialias=True), v2.CenterCrop(size)]
    steps += [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, DEVIATION)]
    made: nn.Module = v2.Compose(steps)
    return made


class Endless(Sampler[int]):
    """Draws samples at random for ever, for measurements."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(self._count).tolist()

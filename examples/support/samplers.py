"""Which samples a worker trains: leased from the server, so that any worker may die, or an equal share."""

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

import psclient

from .launch import Place

EQUAL_SHARES = ("momentum-sgd", "wagma")
"""Methods without elastic data: one has no server, in the other workers wait for each other's steps."""


class EqualShares(Sampler[int]):
    """A fixed share of every epoch, of the same length for each worker; an epoch that was cut short begins anew.

    Args:
        data: the dataset.
        place: of this worker.
        seed: of the order.
        start: the epoch to begin with.
    """

    def __init__(self, data: Sized, place: Place, seed: int, start: int) -> None:
        self._size, self._place, self._seed, self._epoch = len(data), place, seed, start

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs; iterate over a loader in the body."""
        while self._epoch < count:
            yield self._epoch
            self._epoch += 1

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        order = torch.randperm(self._size, generator=generator)
        share = self._size // self._place.workers
        return iter(order[self._place.index * share : (self._place.index + 1) * share].tolist())


def make_sampler(
    method: str, data: Sized, optimizer: torch.optim.Optimizer, place: Place, seed: int, start: int
) -> psclient.ElasticSampler | EqualShares:
    """Return a sampler with ``epochs(count)``; ``start`` is the first epoch where no server says it."""
    if method in EQUAL_SHARES:
        return EqualShares(data, place, seed, start)
    lease_samples = max(1, min(1024, len(data) // (4 * place.workers)))
    return psclient.ElasticSampler(data, optimizer, seed=seed, lease_samples=lease_samples)  # type: ignore[arg-type]

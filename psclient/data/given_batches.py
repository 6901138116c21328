"""The batches that a loader has given out: whether a step's number of samples is that of whole batches.

A loader draws ahead of the training, so what was drawn says nothing about a step. What was given to the loop does.
"""

import sys
import weakref
from collections import deque
from itertools import accumulate
from types import FrameType
from typing import Any

from torch.utils.data import BatchSampler, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from psclient.errors import ConfigurationError


class GivenBatches:
    """Sizes of the batches that a loader has given out in one pass over a sampler and that no step has trained.

    Made when the pass draws its first sample. ``carried`` samples were given out before, and are not trained either.
    """

    def __init__(self, sampler: Sampler[int], carried: int) -> None:
        loader = _loader_that_draws()
        size = None if loader is None else _batch_size(loader._index_sampler, sampler)
        self._loader = None if loader is None or size is None else weakref.ref(loader)
        self._batch_size = size or 1
        self._sizes = deque([carried] if carried else [])
        self._drawn = self._given = 0  # samples, batches

    @property
    def are_known(self) -> bool:
        """Whether a loader of torch with batches of one size draws; of another nothing can be said."""
        return self._loader is not None

    def draw(self) -> None:
        """Count a sample that goes to the loader."""
        self._drawn += 1

    def look(self) -> None:
        """Count the batches that were given out by now; a loader that has gone says nothing any more."""
        loader = None if self._loader is None else self._loader()
        while loader is not None and self._given < loader._num_yielded:
            self._sizes.append(min(self._batch_size, self._drawn - self._given * self._batch_size))
            self._given += 1

    def take(self, samples: int) -> None:
        """Count samples that a step has trained, the first that were given out."""
        self.look()
        while samples and self._sizes:
            taken = min(samples, self._sizes[0])
            samples, self._sizes[0] = samples - taken, self._sizes[0] - taken
            if not self._sizes[0]:
                self._sizes.popleft()

    def check(self, samples: int) -> None:
        """Raise :class:`ConfigurationError` unless some neighbouring batches have this number of samples."""
        self.look()
        sizes = list(self._sizes)
        if any(samples in accumulate(sizes[first:]) for first in range(len(sizes))):
            return
        raise ConfigurationError(
            f"a step counts {samples} samples, and the loader of ElasticSampler has given out batches of {sizes} since "
            "the last one: other samples would count as trained. The number is the first dimension of the first tensor "
            "that model= is called with, at each call; lists of images, (T, B, F) and graphs have the batch elsewhere. "
            "Pass the number of samples that were drawn for the step: optimizer.step(samples=len(batch)). If step() "
            "takes none (overlap=True, Outer, WAGMA), let model= be a module that is called once for each batch, with "
            "a tensor whose first dimension is the batch"
        )


def _loader_that_draws() -> Any:
    """Return the loader's iterator that draws the first sample of a pass; ``None`` if none of torch's does."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "_next_index" else None
        if isinstance(owner, _BaseDataLoaderIter):
            return owner
        frame = frame.f_back
    return None


def _batch_size(index_sampler: Any, sampler: Sampler[int]) -> int | None:
    """Return how many samples a loader takes for a batch; ``None`` if it has a way of its own."""
    if index_sampler is sampler:
        return 1
    return int(index_sampler.batch_size) if type(index_sampler) is BatchSampler else None

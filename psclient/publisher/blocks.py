"""The block of a tensor that a rank has: which elements of the whole it is, as DTensor shards tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from psclient.errors import ConfigurationError
from psclient.publisher.source import spec_of
from pscore.model.layout import TensorSpec

Run = tuple[int, int]
"""Start and end of a range of indices along one dimension."""

Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Block:
    """The elements of a tensor whose index along each dimension lies in one of that dimension's runs.

    Attributes:
        spec: of the whole tensor.
        runs: of each dimension, ascending; ``shape`` and ``numel`` are the block's own.
    """

    spec: TensorSpec
    runs: tuple[tuple[Run, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the block."""
        return tuple(_length(runs) for runs in self.runs)

    @property
    def numel(self) -> int:
        """Elements of the block; 1 of a scalar."""
        return math.prod(self.shape)

    def indices(self) -> tuple[Places, ...]:
        """Return the indices along each dimension."""
        return tuple(
            np.concatenate([np.empty(0, np.int64), *(np.arange(*run, dtype=np.int64) for run in runs)])
            for runs in self.runs
        )

    def offsets(self, places: Places, words: int) -> Places:
        """Return where words of the block lie in the whole tensor, if each element has so many ``words``.

        ``places`` (ascending) count from the block's first word, and what is returned (ascending) from the tensor's.
        """
        elements, rest = np.divmod(places, words)
        first = self._first_of_rows()
        if first is not None:
            return places + words * first
        found = np.zeros_like(elements)
        along = np.unravel_index(elements, self.shape) if self.runs else ()
        for dimension, (position, indices) in enumerate(zip(along, self.indices(), strict=True)):
            found += indices[position] * math.prod(self.spec.shape[dimension + 1 :])
        return words * found + rest

    def of(self, whole: NDArray[Any], words: int) -> NDArray[Any]:
        """Return the block's words, copied out of the whole tensor's."""
        first, size = self._first_of_rows(), words * self.numel
        if first is not None:
            return whole[words * first : words * first + size].copy()
        return whole.reshape(*self.spec.shape, words)[np.ix_(*self.indices())].reshape(-1)

    def write(self, whole: NDArray[Any], mine: NDArray[Any], words: int) -> None:
        """Write the block's words into the whole tensor's."""
        first = self._first_of_rows()
        if first is not None:
            whole[words * first : words * first + mine.size] = mine
        else:
            whole.reshape(*self.spec.shape, words)[np.ix_(*self.indices())] = mine.reshape(*self.shape, words)

    def _first_of_rows(self) -> int | None:
        """Return the first element of a block of whole rows that follow one another; ``None`` for another block."""
        if not self.numel:
            return 0
        if any(runs != ((0, size),) for runs, size in zip(self.runs[1:], self.spec.shape[1:], strict=True)):
            return None
        if not self.runs:
            return 0
        return self.runs[0][0][0] * math.prod(self.spec.shape[1:]) if len(self.runs[0]) == 1 else None


def block_of(name: str, tensor: torch.Tensor) -> tuple[Block, torch.Tensor]:
    """Return a rank's block of a tensor, and its elements; of a tensor that is no DTensor, all of it.

    Raises :class:`ConfigurationError` for a placement that does not say which elements these are, as ``Partial``.
    """
    runs: list[tuple[Run, ...]] = [((0, size),) if size else () for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return Block(spec_of(name, tensor), tuple(runs)), tensor
    mesh, local = tensor.device_mesh, tensor.to_local()
    coordinate = mesh.get_coordinate()
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise ConfigurationError(
                f"{name!r} has the placement {placement!r}, whose elements no rank has: redistribute it, to Shard or "
                "Replicate, before it is published"
            )
        if coordinate is not None:
            sharded = placement.dim % tensor.dim()
            factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            runs[sharded] = _shard(runs[sharded], mesh.size(dimension), coordinate[dimension], factor)
    if coordinate is None:  # this rank is not in the mesh
        runs = [(), *runs[1:]]
    block = Block(spec_of(name, tensor), tuple(runs))
    if block.shape != tuple(local.shape) and block.numel + local.numel():
        raise ConfigurationError(
            f"this rank's block of {block.spec.describe()} has the shape {list(local.shape)}, and not "
            f"{list(block.shape)} as {tensor.placements} on {mesh} have it: publish its full_tensor()"
        )
    return block, local


def _shard(runs: Sequence[Run], ranks: int, rank: int, factor: int) -> tuple[Run, ...]:
    """Return a rank's part of runs, which are cut into ``factor`` pieces, and each of these among the ranks."""
    found: list[Run] = []
    for piece in _chunks(_length(runs), factor):
        start, end = _chunks(piece[1] - piece[0], ranks)[rank]
        found += _between(runs, piece[0] + start, piece[0] + end)
    joined: list[Run] = []
    for run in found:
        if joined and joined[-1][1] == run[0]:
            run = joined.pop()[0], run[1]
        joined.append(run)
    return tuple(joined)


def _chunks(size: int, count: int) -> list[Run]:
    """Cut a length as :func:`torch.chunk` does, with empty parts at the end."""
    step = -(-size // count)
    return [(min(size, number * step), min(size, (number + 1) * step)) for number in range(count)]


def _between(runs: Sequence[Run], start: int, end: int) -> list[Run]:
    """Return the elements from ``start`` to ``end`` of runs that are counted through."""
    found, before = [], 0
    for first, last in runs:
        low, high = max(start - before, 0), min(end - before, last - first)
        if low < high:
            found.append((first + low, first + high))
        before += last - first
    return found


def _length(runs: Sequence[Run]) -> int:
    return sum(end - start for start, end in runs)

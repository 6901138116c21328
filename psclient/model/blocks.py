"""The block of a tensor that a rank has: which elements of the whole it is, as DTensor shards tensors."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from psclient.errors import ConfigurationError
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
        first = self.first
        if first is not None:
            return places + words * first
        found = np.zeros_like(elements)
        along = np.unravel_index(elements, self.shape) if self.runs else ()
        for dimension, (position, indices) in enumerate(zip(along, self.indices(), strict=True)):
            found += indices[position] * math.prod(self.spec.shape[dimension + 1 :])
        return words * found + rest

    def of(self, whole: NDArray[Any], words: int) -> NDArray[Any]:
        """Return the block's words, copied out of the whole tensor's."""
        first, size = self.first, words * self.numel
        if first is not None:
            return whole[words * first : words * first + size].copy()
        return whole.reshape(*self.spec.shape, words)[np.ix_(*self.indices())].reshape(-1)

    def write(self, whole: NDArray[Any], mine: NDArray[Any], words: int) -> None:
        """Write the block's words into the whole tensor's."""
        first = self.first
        if first is not None:
            whole[words * first : words * first + mine.size] = mine
        else:
            whole.reshape(*self.spec.shape, words)[np.ix_(*self.indices())] = mine.reshape(*self.shape, words)

    def before(self, offset: int) -> int:
        """Return how many of the block's elements lie before an offset of the whole tensor, from 0 to its end."""
        if not self.runs:
            return min(offset, 1)
        found, rest = 0, offset
        for dimension, runs in enumerate(self.runs):
            index, rest = divmod(rest, max(1, math.prod(self.spec.shape[dimension + 1 :])))
            below = sum(min(max(index, start), end) - start for start, end in runs)
            found += below * math.prod(self.shape[dimension + 1 :])
            if not any(start <= index < end for start, end in runs):
                break
        return found

    def inside(self, offsets: Places) -> tuple[slice | Places, Places]:
        """Return which of some offsets of the whole tensor (ascending) lie in the block, and their places in it."""
        first = self.first
        if first is not None:
            low, high = np.searchsorted(offsets, (first, first + self.numel)).tolist()
            return slice(low, high), offsets[low:high] - first
        places, is_mine = np.zeros_like(offsets), np.ones(offsets.size, bool)
        along = np.unravel_index(offsets, self.spec.shape)
        for index, mine, size in zip(along, self.indices(), self.spec.shape, strict=True):
            position = np.full(size, -1, np.int64)
            position[mine] = np.arange(mine.size)
            at = position[index]
            is_mine &= at >= 0
            places = places * mine.size + at
        rows = np.flatnonzero(is_mine)
        return rows, places[rows]

    @property
    def first(self) -> int | None:
        """The first element, if the block is whole rows that follow one another; ``None`` for another block."""
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
        return Block(TensorSpec(name, tuple(tensor.shape), tensor.dtype), tuple(runs)), tensor
    mesh, local = tensor.device_mesh, tensor.to_local()
    coordinate = mesh.get_coordinate()
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise ConfigurationError(
                f"{name!r} has the placement {placement!r}, whose elements no rank has: redistribute() it first, to "
                "Shard or Replicate"
            )
        if coordinate is not None:
            sharded = placement.dim % tensor.dim()
            factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            runs[sharded] = _shard(runs[sharded], mesh.size(dimension), coordinate[dimension], factor)
    if coordinate is None:  # this rank is not in the mesh
        runs = [(), *runs[1:]]
    block = Block(TensorSpec(name, tuple(tensor.shape), tensor.dtype), tuple(runs))
    if block.shape != tuple(local.shape) and block.numel + local.numel():
        raise ConfigurationError(
            f"this rank's block of {block.spec.describe()} has the shape {list(local.shape)}, and not "
            f"{list(block.shape)} as {tensor.placements} on {mesh} have it: redistribute() it to other placements, or "
            "publish its full_tensor()"
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


def describe_blocks(blocks: Sequence[Block]) -> bytes:
    """Write blocks for another rank."""
    return json.dumps(
        [
            [block.spec.name, block.spec.shape, str(block.spec.dtype).removeprefix("torch."), block.runs]
            for block in blocks
        ]
    ).encode()


def read_blocks(description: bytes) -> list[Block]:
    """Read what :func:`describe_blocks` wrote."""
    return [
        Block(
            TensorSpec(name, tuple(shape), getattr(torch, dtype)),
            tuple(tuple((start, end) for start, end in each) for each in runs),
        )
        for name, shape, dtype, runs in json.loads(description)
    ]


def owners_of(ranks: Sequence[Sequence[Block]]) -> tuple[list[TensorSpec], list[list[bool]]]:
    """Return the tensors that ranks have blocks of, and for each rank which of its blocks it speaks for.

    Of equal blocks the first rank's speaks for all, and nobody for one without elements.
    :class:`ConfigurationError` if the blocks are not the whole of each tensor, once each.
    """
    specs: dict[str, TensorSpec] = {}
    owners: dict[str, dict[tuple[tuple[Run, ...], ...], int]] = defaultdict(dict)
    for rank, blocks in enumerate(ranks):
        for block in blocks:
            spec = specs.setdefault(block.spec.name, block.spec)
            if spec != block.spec:
                raise ConfigurationError(
                    f"rank {rank} of the group has {block.spec.describe()}, another one {spec.describe()}"
                )
            if block.numel:
                owners[spec.name].setdefault(block.runs, rank)
    for spec in specs.values():
        elements = sum(Block(spec, runs).numel for runs in owners[spec.name])
        if elements != spec.numel:
            raise ConfigurationError(
                f"the ranks' blocks of {spec.name!r}, {spec.describe()}, have {elements} elements: every rank that has "
                "one must be in the group"
            )
    spoken_for = [
        [block.numel > 0 and owners[block.spec.name][block.runs] == rank for block in blocks]
        for rank, blocks in enumerate(ranks)
    ]
    return [*specs.values()], spoken_for


def copies_of(ranks: Sequence[Sequence[Block]]) -> list[tuple[int, list[int]]]:
    """Return the blocks that several ranks have: a position in each rank's sequence, and the ranks, ascending."""
    found = []
    for position, blocks in enumerate(zip(*ranks, strict=True)):
        owners: dict[tuple[Run, ...], list[int]] = defaultdict(list)
        for rank, block in enumerate(blocks):
            if block.numel:
                owners[block.runs].append(rank)
        found += [(position, each) for each in owners.values() if len(each) > 1]
    return found

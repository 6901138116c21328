"""A rank's part of a model that no rank has whole: its blocks, and where they lie in the layout of the whole model.

The blocks are a model of their own, whose parameters are the memory of the ranks' DTensors. So what works on parameters
works on blocks; this file maps entries between the two layouts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from psclient.errors import ConfigurationError, ModelChangedError
from psclient.model.blocks import Block, block_of
from psclient.model.module import NamedBuffers, TrainedModel
from psclient.model.requirements import local_of
from pscore.model.layout import ModelLayout, Span, TensorSpec
from pscore.model.sparse_slice import SparseSlice, by_tensor, merge


class Part:
    """One rank's blocks of a model.

    Args:
        model: the whole one, whose parameters are DTensors or plain tensors.

    Attributes:
        whole: that model.
        own: the blocks as a model. Its parameters are aliases: tensors over the memory of the blocks.
        blocks: of each parameter of the model, in the order of the layout.

    Raises:
        ConfigurationError: a parameter has the placement ``Partial``.
    """

    def __init__(self, model: TrainedModel) -> None:
        found = [
            block_of(spec.name, parameter)
            for spec, parameter in zip(model.layout.parameters, model.parameters, strict=True)
        ]
        self.whole, self.blocks = model, tuple(block for block, _ in found)
        pairs = zip(found, model.parameters, strict=True)
        aliases = [local.detach().requires_grad_(parameter.requires_grad) for (_, local), parameter in pairs]
        specs = [TensorSpec(block.spec.name, block.shape, block.spec.dtype) for block in self.blocks]
        self.own = replace(
            model,
            layout=ModelLayout(tuple(specs)),
            parameters=tuple(aliases),
            frozen=(),
            frozen_writes=(),
            places=(),
            buffers=NamedBuffers([]),
            module=None,
        )
        self._positions = {id(parameter): position for position, parameter in enumerate(model.parameters)}

    def alias_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the block of a parameter; ``None`` of one that is not trained."""
        position = self._positions.get(id(parameter))
        return None if position is None else self.own.parameters[position]

    def groups(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return param groups with blocks in the place of the parameters."""
        return [
            {**group, "params": [mine for each in group["params"] if (mine := self.alias_of(each)) is not None]}
            for group in groups
        ]

    def check(self) -> None:
        """Raise :class:`ModelChangedError` if a DTensor has another local tensor than it had."""
        for spec, parameter, alias in zip(
            self.whole.layout.parameters, self.whole.parameters, self.own.parameters, strict=True
        ):
            local = local_of(parameter)
            if local.shape != alias.shape or local.dtype != alias.dtype or local.data_ptr() != alias.data_ptr():
                raise ModelChangedError(
                    spec.name,
                    "has another local tensor than when the optimizer was made",
                    "convert, move and shard models before, and copy values into the tensors that are there",
                )

    def gradients(self, positions: Iterable[int]) -> dict[int, torch.Tensor]:
        """Return this rank's blocks of the gradients at these positions, by position, without a copy."""
        found = ((position, self.whole.parameters[position].grad) for position in positions)
        return {position: local_of(gradient) for position, gradient in found if gradient is not None}

    def check_gradients(self, positions: Iterable[int]) -> None:
        """Raise :class:`ConfigurationError` if a gradient lies otherwise than its parameter, as ``Partial``."""
        for position in positions:
            parameter = self.whole.parameters[position]
            gradient = parameter.grad
            if gradient is None or not isinstance(parameter, DTensor):
                continue
            if not isinstance(gradient, DTensor) or gradient.placements != parameter.placements:
                there = gradient.placements if isinstance(gradient, DTensor) else "no placements"
                raise ConfigurationError(
                    f"the gradient of {self.whole.layout.parameters[position].name!r} has {there}, and the parameter "
                    f"{parameter.placements}: before step() set parameter.grad = parameter.grad.redistribute("
                    "placements=parameter.placements), on all ranks"
                )

    # Between the layouts

    def outgoing(self, slices: Iterable[SparseSlice]) -> Iterator[tuple[int, SparseSlice]]:
        """Yield a parameter's position, and entries of its block, on the host: offsets count in the whole tensor.

        Without offsets they are the whole block, in the order of its elements.
        """
        for each in slices:
            for position, part in by_tensor(self.own.layout, each.cpu()):
                block, start = self.blocks[position], self.own.layout.offsets[position]
                span = self.whole.layout.span(position)
                low = part.span.start - start
                if part.offsets is None and part.entries == block.numel:
                    yield position, SparseSlice(span, None, part.values)
                    continue
                places = np.arange(part.entries) if part.offsets is None else part.offsets.numpy()
                yield position, SparseSlice(span, torch.from_numpy(block.offsets(places + low, 1)), part.values)

    def incoming(self, segments: Iterable[SparseSlice]) -> list[SparseSlice]:
        """Return the entries that lie in this rank's blocks, in the layout of the blocks; on the host."""
        found: list[SparseSlice] = []
        for segment in segments:
            parts = list(self._incoming(segment.cpu()))
            if parts and all(part.offsets is not None for part in parts):
                joined = merge(Span(parts[0].span.start, parts[-1].span.end), parts)
                assert joined is not None
                parts = [joined]
            found += parts
        return found

    def _incoming(self, segment: SparseSlice) -> Iterator[SparseSlice]:
        for position, part in by_tensor(self.whole.layout, segment):
            block, start = self.blocks[position], self.own.layout.offsets[position]
            low = part.span.start - self.whole.layout.offsets[position]
            if part.offsets is None:
                mine = self.range_in(position, part.span)
                if len(mine):
                    span = Span(start + mine.start, start + mine.stop)
                    yield SparseSlice(span, None, part.values[_places(block, mine, low)])
                continue
            which, places = block.inside(part.offsets.numpy() + low)
            if places.size:
                values = part.values[which if isinstance(which, slice) else torch.from_numpy(which)]
                yield SparseSlice(self.own.layout.span(position), torch.from_numpy(places), values)

    def range_in(self, position: int, span: Span) -> range:
        """Return which elements of this rank's block of a parameter lie in a span of the whole layout."""
        return range_of(self.blocks[position], self.whole.layout.offsets[position], span)

    def local_span(self, position: int, span: Span) -> Span:
        """Return the span of the blocks' layout that a parameter's part of a span is, ascending."""
        start, mine = self.own.layout.offsets[position], self.range_in(position, span)
        return Span(start + mine.start, start + mine.stop)


def range_of(block: Block, start: int, span: Span) -> range:
    """Return which elements of a block lie in a span, if its tensor begins at ``start``."""
    low, high = (min(max(edge - start, 0), block.spec.numel) for edge in (span.start, span.end))
    return range(block.before(low), block.before(high)) if block.numel else range(0)


def _places(block: Block, mine: range, low: int) -> slice | torch.Tensor:
    """Return where neighbouring elements of a block lie, in what begins at element ``low`` of the tensor."""
    if block.first is not None:
        return slice(block.first + mine.start - low, block.first + mine.stop - low)
    return torch.from_numpy(block.offsets(np.arange(mine.start, mine.stop), 1) - low)


def fill(buffer: torch.Tensor, values: torch.Tensor, block: Block, mine: range, low: int) -> None:
    """Write neighbouring elements of a block into a part of the tensor that begins at its element ``low``."""
    buffer[_places(block, mine, low)] = values


def like(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return values of a block, ``[n]``, as a tensor that is sharded as ``parameter`` is; no rank speaks."""
    if not isinstance(parameter, DTensor):
        return values
    local = values.reshape(local_of(parameter).shape)
    mesh, placements = parameter.device_mesh, parameter.placements
    found: DTensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=_strides(parameter.shape)
    )
    return found


def block_like(values: torch.Tensor, parameter: torch.Tensor, block: Block) -> torch.Tensor:
    """Return this rank's block, ``[n]``, of values of a parameter: a DTensor's, or cut out of all of them.

    A DTensor that lies otherwise is redistributed, in which all ranks take part.
    """
    if isinstance(values, DTensor):
        assert isinstance(parameter, DTensor)
        if values.placements != parameter.placements or values.device_mesh != parameter.device_mesh:
            values = values.redistribute(parameter.device_mesh, parameter.placements)
        return local_of(values).reshape(-1)
    return torch.from_numpy(block.of(values.detach().cpu().float().reshape(-1).numpy(), 1))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, size = [], 1
    for length in reversed(shape):
        strides.append(size)
        size *= length
    return tuple(reversed(strides))

"""From gradients to what is sent: the method says what is accumulated, the selector what is taken.

This is where a method's memory meets the one pass over it that :mod:`pscore.select.inputs` makes of accumulating and
taking.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from psclient.compress.method import Group, Method, Sent, Sparse, State, Step, Whole, give_back
from psclient.errors import UpdateOverflowError
from psclient.model.module import TrainedModel
from pscore.model.layout import Span
from pscore.model.segment import Segment
from pscore.select import Selector, SelectorState, entries_for
from pscore.select.base import take_all
from pscore.select.inputs import Joined, Memory
from pscore.select.kernels import device_selection
from pscore.select.kernels.base import Taken
from pscore.select.kernels.cuda import DeviceSelection
from pscore.select.warm import warm

SelectOver = Literal["tensor", "group"]


@dataclass(slots=True)
class Tally:
    """How close a selection came to what was asked of it; tensors that are sent whole do not count.

    Attributes:
        wanted: ``Σ k``.
        selected: entries that were selected.
    """

    wanted: int = 0
    selected: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """How entries are chosen.

    Attributes:
        selector: takes about k entries.
        over: whether each tensor, or all tensors of a group together, are selected from.
        dense_below: tensors with fewer elements send every entry that is not zero.
        on_device: returns what selects on a device without waiting for it, where there is such a thing; it stands in
            for the warm selector over single tensors.
    """

    selector: Selector
    over: SelectOver
    dense_below: int
    on_device: Callable[[torch.device], DeviceSelection | None] = device_selection


def compress(steps: Sequence[tuple[Sparse | Whole, State]], density: float, choice: Choice, tally: Tally) -> list[Sent]:
    """Accumulate and select for tensors of one group, which share a density and a device.

    Args:
        steps: for each tensor what its method's ``accumulate`` said, and its state.
        density: share of the entries that is to be taken.
        choice: how.
        tally: counts what was selected.

    Returns:
        What each tensor sends, in order.
    """
    sent: dict[int, Sent] = {}
    sparse: dict[int, Sparse] = {}
    for number, (said, _) in enumerate(steps):
        if isinstance(said, Whole):
            sent[number] = Sent(None, said.values)
        elif said.memory.numel() < choice.dense_below:
            sent[number] = _finish(said._replace(masked=None), take_all(_source(said)))
        else:
            sparse[number] = said
    device = choice.on_device(next(iter(sparse.values())).memory.device) if sparse else None
    if device is not None and choice.selector is warm and choice.over == "tensor":
        sent |= _on_device(device, sparse, [state for _, state in steps], density, tally)
    else:
        pools = [list(sparse)] if choice.over == "group" and sparse else [[number] for number in sparse]
        for pool in pools:
            recall = steps[pool[0]][1].setdefault("recall", {})
            sent |= _pooled({number: sparse[number] for number in pool}, recall, density, choice.selector, tally)
    return [sent[number] for number in range(len(steps))]


def _pooled(
    pool: Mapping[int, Sparse], recall: SelectorState, density: float, selector: Selector, tally: Tally
) -> dict[int, Sent]:
    """Select from some memories as if they were one."""
    joined = Joined([_source(said) for said in pool.values()])
    k = entries_for(joined.numel, density)
    taken = selector(joined if len(pool) > 1 else joined.parts[0], k, recall)
    tally.wanted += k
    tally.selected += taken.offsets.numel()
    return {
        number: _finish(said, piece) for (number, said), piece in zip(pool.items(), joined.split(taken), strict=True)
    }


def _on_device(
    device: DeviceSelection, sparse: Mapping[int, Sparse], states: Sequence[State], density: float, tally: Tally
) -> dict[int, Sent]:
    """Launch every selection before the first is waited for; the entries arrive on the host."""
    pending = {
        number: device.take(
            said.memory, said.added, entries_for(said.memory.numel(), density), said.keep, states[number], said.masked
        )
        for number, said in sparse.items()
    }
    sent = {}
    for number, said in sparse.items():
        taken = pending[number].collect()
        tally.wanted += pending[number].k
        tally.selected += pending[number].count
        sent[number] = Sent(taken.offsets, said.unit * taken.values)
    return sent


def empty(said: Sparse) -> Sent:
    """Take everything that a memory holds."""
    return _finish(said, take_all(_source(said)))


def _source(said: Sparse) -> Memory:
    return Memory(said.memory, said.added, said.keep)


def _finish(said: Sparse, taken: Taken) -> Sent:
    if said.masked is not None:
        said.masked[taken.offsets] = 0
    return Sent(taken.offsets, taken.values if said.unit == 1 else said.unit * taken.values)


class Compressor:
    """Compresses a model's gradients, group by group, and takes back what did not arrive.

    Args:
        method: the training method.
        model: whose tensors.
        memories: each parameter's state.
        group_of: the hyper-parameters of a trained parameter now; ``None`` for a frozen one.
        choice: how entries are chosen.
        density_of: the density of the tensor at a position, where it has one of its own; ``None`` leaves it to its
            hyper-parameters.

    Attributes:
        memories: may be replaced between two steps.
    """

    def __init__(
        self,
        method: type[Method],
        model: TrainedModel,
        memories: MutableMapping[torch.Tensor, State],
        group_of: Callable[[torch.Tensor], Group | None],
        choice: Choice,
        density_of: Callable[[int], float | None],
    ) -> None:
        """Keep references."""
        self._method = method
        self._model = model
        self.memories = memories
        self._group_of = group_of
        self._choice = choice
        self._density_of = density_of
        self._shares: dict[int, float] = {}  # of what each tensor has sent last; at most one push is under way

    def compress(
        self, positions: Iterable[int], gradients: Mapping[int, torch.Tensor], scale: float, tally: Tally
    ) -> list[tuple[int, Sent]]:
        """Compress the tensors at these positions of the layout that have a gradient.

        Args:
            positions: ascending.
            gradients: finite, by position.
            scale: what every gradient is multiplied by.
            tally: counts what was selected.

        Returns:
            (position, what is sent), ascending.

        Raises:
            UpdateOverflowError: gradient times learning rate has left the range of fp32; what had been selected is
                given back, without the entries concerned.
        """
        alike: dict[tuple[float, torch.device], list[int]] = {}
        said: dict[int, tuple[Sparse | Whole, State]] = {}
        for position in positions:
            parameter = self._model.parameters[position]
            group = self._group_of(parameter)
            if position not in gradients or group is None:
                continue
            decayed = parameter.detach().reshape(-1) if group.get("weight_decay") else None
            gradient = gradients[position].detach().reshape(-1)
            step = Step(gradient if scale == 1 else gradient.float() * scale, decayed)
            state = self.memories[parameter]
            accumulated = self._method.accumulate(state, group, step)
            said[position] = (accumulated, state)
            self._shares[position] = accumulated.share
            own = self._density_of(position)
            density = group["density"] if own is None else own
            alike.setdefault((density, parameter.device), []).append(position)
        sent: dict[int, Sent] = {}
        for (density, _), members in alike.items():
            found = compress([said[position] for position in members], density, self._choice, tally)
            sent.update(zip(members, found, strict=True))
        if not all(bool(entry.values.isfinite().all()) for entry in sent.values()):
            raise UpdateOverflowError(self._without_overflow(sent))
        return sorted(sent.items())

    def _without_overflow(self, sent: Mapping[int, Sent]) -> str:
        """Give the finite entries back and clear the others in all memories; return the name of a tensor of theirs."""
        name = ""
        for position, entry in sent.items():
            parameter = self._model.parameters[position]
            good = entry.values.isfinite()
            offsets = torch.arange(len(good), device=good.device) if entry.offsets is None else entry.offsets
            if not bool(good.all()):
                name = self._model.layout.parameters[position].name
                state = self.memories[parameter]
                for key, memory in list(state.items()):
                    if isinstance(memory, torch.Tensor) and memory.dim():
                        memory.nan_to_num_(0.0, 0.0, 0.0)[offsets[~good].to(memory.device)] = 0
                    else:  # a threshold, which may be infinite too: selection begins anew
                        del state[key]
            returned = Sent(offsets[good], entry.values[good])
            give_back(self.memories[parameter], self._shares[position], returned, parameter)
        return name

    def empty(self, positions: Iterable[int]) -> list[tuple[int, Sent]]:
        """Take everything out that these tensors hold; as :meth:`compress` returns it."""
        sent = []
        for position in positions:
            parameter = self._model.parameters[position]
            group = self._group_of(parameter)
            if group is None or "residual" not in self.memories.get(parameter, ()):
                continue
            said = self._method.held(self.memories[parameter], group)
            self._shares[position] = said.share
            sent.append((position, empty(said)))
        return sent

    def give_back(self, segments: Iterable[Segment]) -> None:
        """Give entries back to the memories that they came from."""
        for segment in segments:
            for position, common in self._model.layout.overlapping(segment.span):
                piece = segment.clip(common)
                if piece is None:
                    continue
                parameter = self._model.parameters[position]
                returned = _within(piece, self._model.layout.span(position))
                give_back(self.memories[parameter], self._shares[position], returned, parameter)


def _within(piece: Segment, span: Span) -> Sent:
    """Count a piece's offsets from the start of its tensor."""
    shift = piece.span.start - span.start
    if piece.offsets is not None:
        return Sent(piece.offsets + shift, piece.values)
    if piece.span == span:
        return Sent(None, piece.values)
    return Sent(torch.arange(shift, shift + piece.span.length, device=piece.values.device), piece.values)

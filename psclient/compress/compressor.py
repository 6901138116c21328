"""From gradients to what is sent: the method defines what is accumulated, the selector what is taken.

:mod:`pscore.select.inputs` accumulates and takes in one pass over a method's memory.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from psclient.compress.method import Group, Method, Sparse, State, Step, Whole, memory, restore
from psclient.errors import UpdateOverflowError
from psclient.model.module import TrainedModel
from psclient.report import StepReport
from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.select import Selector, SelectorState, entries_for
from pscore.select.base import take_all
from pscore.select.inputs import Joined, Memory
from pscore.select.kernels import device_selection
from pscore.select.kernels.base import Taken
from pscore.select.kernels.cuda import DeviceSelection
from pscore.select.warm import warm

SelectOver = Literal["tensor", "group"]


@dataclass(frozen=True, slots=True)
class Choice:
    """How entries are chosen.

    Attributes:
        over: whether each tensor, or all tensors of a group together, are selected from.
        dense_below: tensors with fewer elements send every entry that is not zero.
        on_device: returns what selects on a device without waiting for it, where there is such a thing; it stands in
            for the warm selector over single tensors.
    """

    selector: Selector
    over: SelectOver
    dense_below: int
    on_device: Callable[[torch.device], DeviceSelection | None] = device_selection


class Accumulated(NamedTuple):
    """What the method makes of one tensor, its state, and its place in the layout."""

    update: Sparse | Whole
    state: State
    span: Span


def compress(
    tensors: Mapping[int, Accumulated], density: float, choice: Choice, report: StepReport
) -> dict[int, SparseSlice]:
    """Accumulate and select for tensors of one group, which share a density and a device; return what each sends.

    The report counts ``Σ k`` and the selected entries; tensors that are sent whole do not count.
    """
    sent: dict[int, SparseSlice] = {}
    sparse: dict[int, Sparse] = {}
    for number, (update, _, span) in tensors.items():
        if isinstance(update, Whole):
            sent[number] = SparseSlice(span, None, update.values)
        elif update.memory.numel() < choice.dense_below:
            sent[number] = take_whole(update, span)
        else:
            sparse[number] = update
    if not sparse:
        return sent
    device = choice.on_device(next(iter(sparse.values())).memory.device)
    if device is not None and choice.selector is warm and choice.over == "tensor":
        sent |= _on_device(device, sparse, tensors, density, report)
    else:
        pools = [list(sparse)] if choice.over == "group" else [[number] for number in sparse]
        for pool in pools:
            recall = tensors[pool[0]].state.setdefault("recall", {})
            taken = _pooled([sparse[number] for number in pool], recall, density, choice.selector, report)
            for number, piece in zip(pool, taken, strict=True):
                sent[number] = _finish(sparse[number], piece, tensors[number].span)
    return sent


def take_whole(update: Sparse, span: Span) -> SparseSlice:
    """Take every entry of a memory that is not zero."""
    return _finish(update._replace(masked=None), take_all(_source(update)), span)


def _pooled(
    pool: Sequence[Sparse], recall: SelectorState, density: float, selector: Selector, report: StepReport
) -> list[Taken]:
    """Select from some memories as if they were one."""
    joined = Joined([_source(update) for update in pool]) if len(pool) > 1 else None
    source = joined or _source(pool[0])
    k = entries_for(source.numel, density)
    taken = selector(source, k, recall)
    report.wanted_entries += k
    report.selected_entries += taken.offsets.numel()
    return [taken] if joined is None else joined.split(taken)


def _on_device(
    device: DeviceSelection,
    sparse: Mapping[int, Sparse],
    tensors: Mapping[int, Accumulated],
    density: float,
    report: StepReport,
) -> dict[int, SparseSlice]:
    """Launch every selection before the first is waited for; the entries arrive on the host."""
    pending = {}
    for number, update in sparse.items():
        k = entries_for(update.memory.numel(), density)
        pending[number] = device.take(update.memory, update.added, k, update.keep, tensors[number].state, update.masked)
    sent = {}
    for number, update in sparse.items():
        taken = pending[number].collect()
        report.wanted_entries += pending[number].k
        report.selected_entries += pending[number].count
        sent[number] = SparseSlice(tensors[number].span, taken.offsets, update.unit * taken.values)
    return sent


def _source(update: Sparse) -> Memory:
    return Memory(update.memory, update.added, update.keep)


def _finish(update: Sparse, taken: Taken, span: Span) -> SparseSlice:
    if update.masked is not None:
        update.masked[taken.offsets] = 0
    return SparseSlice(span, taken.offsets, taken.values if update.unit == 1 else update.unit * taken.values)


class Compressor:
    """Compresses a model's gradients, group by group, and restores what did not arrive.

    Args:
        memories: each parameter's state; may be replaced between two steps.
        group_of: the hyper-parameters of a trained parameter now; ``None`` for a frozen one.
        density_of: the density of its own that the tensor at a position has; ``None`` leaves it to its param group.
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
        self.memories = memories
        self._method, self._model, self._choice = method, model, choice
        self._group_of, self._density_of = group_of, density_of
        self._shares: dict[int, float] = {}  # of what each tensor has sent last; at most one push is under way

    def compress(
        self, positions: Iterable[int], gradients: Mapping[int, torch.Tensor], scale: float, report: StepReport
    ) -> dict[int, SparseSlice]:
        """Return what the tensors at these positions send that have a gradient (finite), by position, ascending.

        Raises:
            UpdateOverflowError: gradient times learning rate has left the range of fp32; what had been selected is
                restored, without the entries concerned.
        """
        alike: dict[tuple[float, torch.device], dict[int, Accumulated]] = {}
        for position in positions:
            parameter = self._model.parameters[position]
            group = self._group_of(parameter)
            if position not in gradients or group is None:
                continue
            decayed = parameter.detach().reshape(-1) if group.get("weight_decay") else None
            gradient = gradients[position].detach().reshape(-1)
            step = Step(gradient if scale == 1 else gradient.float() * scale, decayed)
            state = self.memories[parameter]
            update = self._method.accumulate(state, group, step)
            self._shares[position] = update.share
            own = self._density_of(position)
            key = (group["density"] if own is None else own, parameter.device)
            alike.setdefault(key, {})[position] = Accumulated(update, state, self._model.layout.span(position))
        sent: dict[int, SparseSlice] = {}
        for (density, _), tensors in alike.items():
            sent |= compress(tensors, density, self._choice, report)
        if not all(bool(segment.values.isfinite().all()) for segment in sent.values()):
            raise UpdateOverflowError(self._without_overflow(sent))
        return dict(sorted(sent.items()))

    def _without_overflow(self, sent: Mapping[int, SparseSlice]) -> str:
        """Restore the finite entries and clear the others in all memories; return the name of a tensor of theirs."""
        name = ""
        for position, segment in sent.items():
            good = segment.values.isfinite()
            offsets = torch.arange(len(good), device=good.device) if segment.offsets is None else segment.offsets
            if not bool(good.all()):
                name = self._model.layout.parameters[position].name
                state = self.memories[self._model.parameters[position]]
                for key, tensor in list(state.items()):
                    if isinstance(tensor, torch.Tensor) and tensor.dim():
                        tensor.nan_to_num_(0.0, 0.0, 0.0)[offsets[~good].to(tensor.device)] = 0
                    else:  # a threshold, which may be infinite too: selection begins anew
                        del state[key]
            self.restore([SparseSlice(segment.span, offsets[good], segment.values[good])])
        return name

    def take_residuals(self, positions: Iterable[int]) -> dict[int, SparseSlice]:
        """Take everything out of these tensors' residuals; as :meth:`compress` returns it."""
        sent = {}
        for position in positions:
            parameter = self._model.parameters[position]
            group = self._group_of(parameter)
            if group is None or "residual" not in self.memories.get(parameter, ()):
                continue
            update = self._method.held(self.memories[parameter], group)
            self._shares[position] = update.share
            sent[position] = take_whole(update, self._model.layout.span(position))
        return sent

    def restore(self, segments: Iterable[SparseSlice]) -> None:
        """Add entries that did not arrive to the residuals again."""
        layout = self._model.layout
        for segment in segments:
            for position, common in layout.overlapping(segment.span):
                piece = segment.clip(common)
                if piece is None:
                    continue
                parameter = self._model.parameters[position]
                residual = memory(self.memories[parameter], "residual", parameter)
                first = layout.offsets[position]
                restore(residual[common.start - first : common.end - first], self._shares[position], piece)

"""From gradients to entries to send: the method describes the addition to a memory, the selector carries it out.

:class:`pscore.select.inputs.Memory` adds and selects in one pass over the memory.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from psclient.buckets.planner import BucketPlanner
from psclient.compress.groups import ParamGroups
from psclient.compress.method import DenseUpdate, Method, ResidualUpdate, State, TensorGradient, memory, restore
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


@dataclass(frozen=True, slots=True)
class Choice:
    """How entries are chosen.

    Attributes:
        over: whether each tensor, or all tensors of a group together, are selected from.
        dense_below: tensors with fewer elements send every entry that is not zero.
        on_device: returns the asynchronous selection of a device, which stands in for the warm selector over single
            tensors; ``None`` on the host.
    """

    selector: Selector
    over: Literal["tensor", "group"]
    dense_below: int
    on_device: Callable[[torch.device], DeviceSelection | None] = device_selection


class TensorUpdate(NamedTuple):
    """A method's update of one tensor, the method's state, and the tensor's place in the layout."""

    update: ResidualUpdate | DenseUpdate
    state: State
    span: Span


def select_updates(
    tensors: Mapping[int, TensorUpdate], density: float, choice: Choice, report: StepReport
) -> dict[int, SparseSlice]:
    """Carry out and select from the updates of tensors on one device, by position; return what each tensor sends.

    The report counts ``Σ k`` and the selected entries; tensors that are sent whole do not count.
    """
    sent: dict[int, SparseSlice] = {}
    sparse: dict[int, ResidualUpdate] = {}
    for position, (update, _, span) in tensors.items():
        if isinstance(update, DenseUpdate):
            sent[position] = SparseSlice(span, None, update.values)
        elif update.memory.numel() < choice.dense_below:
            sent[position] = take_whole(update, span)
        else:
            sparse[position] = update
    if not sparse:
        return sent
    device = choice.on_device(next(iter(sparse.values())).memory.device)
    if device is not None and choice.selector is warm and choice.over == "tensor":
        return sent | _on_device(device, sparse, tensors, density, report)
    for pool in [list(sparse)] if choice.over == "group" else [[position] for position in sparse]:
        state = tensors[pool[0]].state.setdefault("recall", {})
        taken = _pooled([sparse[position] for position in pool], state, density, choice.selector, report)
        for position, piece in zip(pool, taken, strict=True):
            sent[position] = _finish(sparse[position], piece, tensors[position].span)
    return sent


def take_whole(update: ResidualUpdate, span: Span) -> SparseSlice:
    """Take every entry of a memory that is not zero; nothing is masked."""
    return _finish(update._replace(masked=None), take_all(_source(update)), span)


def _pooled(
    pool: Sequence[ResidualUpdate], state: SelectorState, density: float, selector: Selector, report: StepReport
) -> list[Taken]:
    """Select from some memories as if they were one."""
    joined = Joined([_source(update) for update in pool]) if len(pool) > 1 else None
    source = joined or _source(pool[0])
    k = entries_for(source.numel, density)
    taken = selector(source, k, state)
    report.wanted_entries += k
    report.selected_entries += taken.offsets.numel()
    return [taken] if joined is None else joined.split(taken)


def _on_device(
    device: DeviceSelection,
    sparse: Mapping[int, ResidualUpdate],
    tensors: Mapping[int, TensorUpdate],
    density: float,
    report: StepReport,
) -> dict[int, SparseSlice]:
    """Launch every selection before the first is waited for; the entries arrive on the host."""
    pending = {}
    for position, update in sparse.items():
        k, state = entries_for(update.memory.numel(), density), tensors[position].state
        pending[position] = device.take(update.memory, update.added, k, update.keep, state, update.masked)
    sent = {}
    for position, selection in pending.items():
        taken = selection.collect()
        report.wanted_entries += selection.k
        report.selected_entries += selection.count
        sent[position] = SparseSlice(tensors[position].span, taken.offsets, sparse[position].unit * taken.values)
    return sent


def _source(update: ResidualUpdate) -> Memory:
    return Memory(update.memory, update.added, update.keep)


def _finish(update: ResidualUpdate, taken: Taken, span: Span) -> SparseSlice:
    if update.masked is not None:
        update.masked[taken.offsets] = 0
    return SparseSlice(span, taken.offsets, taken.values if update.unit == 1 else update.unit * taken.values)


class Compressor:
    """Compresses a model's gradients, group by group, and restores what did not arrive.

    ``memories`` has each parameter's state; it may be replaced between two steps.
    """

    def __init__(
        self,
        method: type[Method],
        model: TrainedModel,
        memories: MutableMapping[torch.Tensor, State],
        groups: ParamGroups,
        choice: Choice,
        planner: BucketPlanner,
    ) -> None:
        self.memories = memories
        self._method, self._model, self._choice = method, model, choice
        self._groups, self._planner = groups, planner
        self._shares: dict[int, float] = {}  # of the last update of each tensor; at most one push is under way

    def compress(
        self, positions: Iterable[int], gradients: Mapping[int, torch.Tensor], scale: float, report: StepReport
    ) -> dict[int, SparseSlice]:
        """Return what the tensors at these positions send that have a gradient (finite), by position, ascending.

        Raises:
            UpdateOverflowError: gradient times learning rate has left the range of fp32; what had been selected is
                restored, without the entries concerned.
        """
        alike: dict[tuple[float, torch.device], dict[int, TensorUpdate]] = {}
        for position in positions:
            parameter = self._model.parameters[position]
            group = self._groups.of(parameter)
            if position not in gradients or group is None:
                continue
            decayed = parameter.detach().reshape(-1) if group.get("weight_decay") else None
            gradient = gradients[position].detach().reshape(-1)
            step = TensorGradient(gradient if scale == 1 else gradient.float() * scale, decayed)
            state = self.memories[parameter]
            update = self._method.accumulate(state, group, step)
            self._shares[position] = update.share
            own = None if self._groups.has_own_density(parameter) else self._planner.densities.get(position)
            key = (group["density"] if own is None else own, parameter.device)
            alike.setdefault(key, {})[position] = TensorUpdate(update, state, self._model.layout.span(position))
        sent: dict[int, SparseSlice] = {}
        for (density, _), tensors in alike.items():
            sent |= select_updates(tensors, density, self._choice, report)
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
            group = self._groups.of(parameter)
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

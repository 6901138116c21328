"""From gradients to entries to send, and back: the residuals get what did not arrive."""

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from psclient.compress.device_table import DeviceTable
from psclient.compress.gradients import Gradients, Scale
from psclient.compress.groups import ParamGroups
from psclient.compress.host_table import Choice, Places, Rule, Sent, Table, WholeBuffer
from psclient.compress.method import Method, State
from psclient.compress.residuals import Memories, WholeMemories
from psclient.compress.row_table import RowTable
from psclient.errors import UpdateOverflowError
from psclient.model.module import TrainedModel
from psclient.model.scatter import scatter
from psclient.report import StepReport
from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.selection.cuda.launches import OUTPUT_BYTES, TARGET
from pscore.selection.rule import ROOM, Integers

Groups = tuple[range, ...]
"""Positions of each group's tensors in the layout, the last group first, as its gradients come first."""


def by_size(sizes: Sequence[float], least: float) -> Groups:
    """Merge neighbours, last first, until a group has this size; sizes in the order of the layout."""
    groups: list[range] = []
    end, size = len(sizes), 0.0
    for position in reversed(range(len(sizes))):
        size += sizes[position]
        if size >= least or position == 0:
            groups.append(range(position, end))
            end, size = position, 0.0
    return tuple(groups)


class Grouping:
    """The groups of pushes: neighbours in the layout, until a group has ``bucket_bytes`` of gradients.

    Attributes:
        groups: in the order of sending; may be replaced between two pushes.
        densities: of single tensors, by position, if these have another than their param group.
    """

    def __init__(self, layout: ModelLayout, bucket_bytes: int) -> None:
        self.groups = by_size([spec.nbytes for spec in layout.parameters], bucket_bytes)
        self.densities: dict[int, float] = {}


_MOST_AT_ONCE = 256 << 20  # bytes of output on a device

_MOST_SETS = 16  # of all tensors, whose tables are kept; which tensors have a gradient may differ from step to step


class Members(NamedTuple):
    """The tensors of a group that have a gradient and are trained.

    Attributes:
        numbers: the param group of each tensor of the model.
        groups: positions, int64, by param group.
        table: of those that are selected from on the host; ``None`` without one.
        rows: of those of which a step has touched some rows; ``None`` without one.
        on_devices: of those that are selected from on their device, a table each.
    """

    numbers: Integers
    groups: dict[int, Integers]
    table: Table | None
    rows: RowTable | None
    on_devices: list[DeviceTable]


class Taken(NamedTuple):
    """The entries that one selection has taken for all groups of a push, and the groups that wait for their part."""

    gradients: Gradients
    entries: dict[int, int]
    waiting: dict[range, list[SparseSlice]]


class Selector:
    """Compresses a model's gradients, group by group, and restores what did not arrive.

    ``states`` has each parameter's state; :attr:`memories` may get others between two steps. :attr:`buffer` has the
    values of dense pushes from the host, and between two pushes nothing.
    """

    def __init__(
        self,
        method: Method,
        model: TrainedModel,
        states: MutableMapping[torch.Tensor, State],
        groups: ParamGroups,
        choice: Choice,
        grouping: Grouping,
    ) -> None:
        self._method, self._model, self._choice = method, model, choice
        self._groups, self._grouping = groups, grouping
        self._shares = np.zeros(len(model.parameters), np.float32)  # of the last update; at most one push is under way
        self._known: dict[tuple[int, int, int, bytes, bytes], Members] = {}
        self._kept = 0  # tensors of all sets that are known
        self._generation = -1  # of the param groups, as the members have them
        self.buffer = WholeBuffer(model.layout.size)
        devices = {parameter.device for parameter in model.parameters if choice.selector is None}
        self._kernels = {device: found for device in devices if (found := choice.on_device(device)) is not None}
        self._on_host = np.array([parameter.device not in self._kernels for parameter in model.parameters], bool)
        self.memories = Memories(model.layout, model.parameters, states, self._on_host, choice.kept_in)
        self._taken: Taken | None = None
        self._states = states  # as they were at the last look
        self._by_rows: set[int] = set()  # positions of which a gradient has named its rows
        self._owed: dict[int, Integers] = {}  # rows whose entries were not applied, and go with the next push

    @property
    def on_one_device(self) -> bool:
        """Whether launches select from all tensors; gradients may be ``unsound`` then, and without them may not."""
        return len(self._kernels) == 1 and not self._on_host.any()

    def compress(self, group: range, gradients: Gradients, scale: Scale, report: StepReport) -> Sent:
        """Return what the tensors of a group send that have a gradient (finite), ascending within a device.

        If launches select from all tensors, those of a step's first group select for all its groups, so that the host
        waits once a step; :meth:`abandon` gives the parts back that are not asked for. After an error the residuals
        have all that had been selected.

        Raises:
            UnsoundError: the gradients are; nothing has changed.
            UpdateOverflowError: gradient times learning rate has left the range of fp32; what had been selected is
                restored, without the entries concerned.
        """
        if not self._selects_at_once(group, gradients):
            return self._compress(group, gradients, scale, report)
        if self._taken is None or self._taken.gradients is not gradients:
            self.abandon()
            sent = self._compress(range(len(self._model.parameters)), gradients, scale, report)
            used = [each for each in self._grouping.groups if not gradients.keys().isdisjoint(each)]
            self._taken = Taken(gradients, sent.entries, self._parts(sent, used))
        taken = self._taken
        slices = taken.waiting.pop(group)
        if not taken.waiting:
            self._taken = None  # gradients live no longer for it
        entries = {n: count for n, count in taken.entries.items() if n in group}
        return Sent(slices, entries, is_finite=True)

    def abandon(self) -> None:
        """Restore the entries of groups that :meth:`compress` was not asked for."""
        taken, self._taken = self._taken, None
        if taken is not None:
            self.restore(each for slices in taken.waiting.values() for each in slices)

    def _selects_at_once(self, group: range, gradients: Gradients) -> bool:
        """Tell whether one selection does for all groups: nothing is sent whole, and the output is small enough."""
        groups = self._grouping.groups
        if len(groups) < 2 or group not in groups or not self.on_one_device or gradients.rows:
            return False
        if gradients.keys().isdisjoint(group):
            return False
        if self._taken is not None and self._taken.gradients is gradients:
            return group in self._taken.waiting
        numbers = self._groups.numbers_of(self._model.parameters)[gradients.positions]
        room = 0.0
        for number in np.unique(numbers[numbers >= 0]).tolist():
            values = self._groups.values(number)
            if self._method.recurrence(values).whole:
                return False
            room += float(min(1.0, ROOM * values["density"]) * gradients.sizes[numbers == number].sum())
        return OUTPUT_BYTES * room <= _MOST_AT_ONCE

    def _parts(self, sent: Sent, groups: Sequence[range]) -> dict[range, list[SparseSlice]]:
        """Return each group's part of entries that were selected at once, whose memory is used again."""
        parts: dict[range, list[SparseSlice]] = {group: [] for group in groups}
        ends = self._model.layout.offsets
        for each in sent.slices:
            mine: list[tuple[Integers, int]] = []
            for group in groups:
                span = Span(ends[group.start], ends[group.stop])
                if each.offsets is None:
                    part = each.clip(span)
                    parts[group].extend([] if part is None else [part])
                    continue
                offsets, first = each.offsets.numpy(), span.start - each.span.start
                low, high = np.searchsorted(offsets, (first, first + span.length)).tolist()
                mine.append((offsets[low:high], first))
                parts[group].append(SparseSlice(span, torch.from_numpy(offsets[low:high]), each.values[low:high]))
            for offsets, first in mine:  # in numpy: torch would start threads, and wait for them on a loaded machine
                offsets -= first
        return parts

    def _compress(self, group: range, gradients: Gradients, scale: Scale, report: StepReport) -> Sent:
        members = self._members(group, gradients)
        rules = {}
        for number, positions in members.groups.items():
            values = self._groups.values(number)
            rules[number] = Rule(self._method.recurrence(values), values["density"])
            self._shares[positions] = rules[number].recurrence.share
        densities = {
            position: density
            for position, density in self._grouping.densities.items()
            if not self._groups.has_own_density(int(members.numbers[position]))
        }
        sent, is_finite = Sent([], {}, is_finite=True), True
        given = rules, densities, gradients, self._model.parameters
        try:
            for table in members.on_devices:  # all work at once, and beside the host
                table.launch(*given, scale, self.memories, self._choice)
            if members.table is not None:
                copied = self._copied(members.table.span)
                lent = copied or self.memories
                sent = members.table.compress(*given, float(scale), lent, self.buffer, self._choice, report)
                if copied is not None:
                    copied.write_back()
                is_finite = sent.is_finite
            if (by_rows := members.rows) is not None:
                found = by_rows.compress(
                    *(rules, densities, gradients, self._owed, self._model.parameters),
                    *(float(scale), self.memories, self._choice, report),
                )
                for position in by_rows.positions.tolist():
                    self._owed.pop(position, None)
                sent.slices.extend(found.slices)
                sent.entries.update(found.entries)
                is_finite &= found.is_finite
            for table in members.on_devices:
                found = table.collect(self.memories, report)
                sent.slices.extend(found.slices)
                sent.entries.update(found.entries)
                is_finite &= found.is_finite
        except BaseException:
            for table in members.on_devices:
                sent.slices.extend(table.abandon(self.memories, report))
            self.restore(sent.slices)
            raise
        if not is_finite:
            raise UpdateOverflowError(self._without_overflow(sent.slices, members))
        return sent

    def _copied(self, span: Span) -> WholeMemories | None:
        """Return a copy in fp32 of the memories in a span; ``None`` if they are fp32 themselves."""
        if self.memories.dtype == torch.float32:
            return None
        return WholeMemories(self.memories, self._model.layout, span)

    def _members(self, group: range, gradients: Gradients) -> Members:
        """Return the tensors of a group that have a gradient; those of other param groups are forgotten."""
        if self._generation != self._groups.generation:
            self._generation = self._groups.generation
            self._known.clear()
            self._kept = 0
        low, high = np.searchsorted(gradients.positions, (group.start, group.stop)).tolist()
        where = gradients.positions[low:high]
        named = np.array([position in gradients.rows for position in where.tolist()] if gradients.rows else [], bool)
        if named.any():
            self._begin_rows(where[named])
        key = group.start, group.stop, low, where.tobytes(), named.tobytes()
        if key not in self._known:
            self._kept += len(where)
            if self._kept > _MOST_SETS * len(self._model.parameters):
                self._known.clear()
                self._kept = len(where)
            numbers = self._groups.numbers_of(self._model.parameters)
            trained = numbers[where] >= 0
            named = named if named.size else np.zeros(where.size, bool)
            on_table = trained & self._on_host[where] & ~named
            named &= trained
            span = Span(self._model.layout.offsets[group.start], self._model.layout.offsets[group.stop])

            edges = np.array(self._model.layout.offsets)

            def places(chosen: NDArray[np.bool_]) -> Places:
                rows = np.flatnonzero(chosen)
                starts, sizes = edges[where[rows]], self._model.sizes[where[rows]]
                return Places(where[rows], numbers[where[rows]], rows + low, starts, sizes, sizes, span)

            on_device = trained & ~self._on_host[where]
            devices = [self._model.parameters[position].device for position in where.tolist()]
            apart = {
                device: on_device & np.array([each == device for each in devices], bool) for device in self._kernels
            }
            self._known[key] = Members(
                numbers,
                {number: where[numbers[where] == number] for number in np.unique(numbers[where[trained]]).tolist()},
                Table(places(on_table)) if on_table.any() else None,
                RowTable(self._model.layout, where[named], numbers[where[named]]) if named.any() else None,
                [
                    DeviceTable(places(chosen), self._kernels[device])
                    for device, chosen in apart.items()
                    if chosen.any()
                ],
            )
        return self._known[key]

    def _begin_rows(self, positions: Integers) -> None:
        """Have the memories of tensors here, of which few rows are used in a step, and not on their device.

        The first time all rows with a residual are owed: of those from before, nobody knows which were refused.
        """
        if self._states is not self.memories.states:  # a state was loaded
            self._states = self.memories.states
            self._by_rows.clear()
            self._owed.clear()
        if not self._on_host[positions].all():
            self._on_host[positions] = True
            self._known.clear()
            self._kept = 0
        for position in positions.tolist():
            if position not in self._by_rows and self.memories.has("residual", (position,))[0]:
                table = self.memories.of("residual", position).reshape(
                    self._model.layout.parameters[position].shape[0], -1
                )
                self._owed[position] = table.any(1).nonzero().view(-1).numpy()
            self._by_rows.add(position)

    def _without_overflow(self, sent: Iterable[SparseSlice], members: Members) -> str:
        """Restore the finite entries and clear the others in all memories; return the name of a tensor of theirs."""
        name = ""
        for position in np.concatenate([*members.groups.values()]).tolist():
            state = self.memories.state(position)
            kept = [each for each in state.values() if isinstance(each, torch.Tensor) and each.dim()]
            if not all(bool(memory.isfinite().all()) for memory in kept):  # those that there was no room to take, too
                name = self._model.layout.parameters[position].name
                for memory in kept:
                    memory.nan_to_num_(0.0, 0.0, 0.0)
                state.pop("recall", None)
        for position, piece in self._by_tensor(sent):
            good = piece.values.isfinite()
            offsets = piece.offsets
            if offsets is None:
                offsets = torch.arange(len(good), dtype=torch.int64, device=good.device)
            if not bool(good.all()):
                name = self._model.layout.parameters[position].name
                state = self.memories.state(position)
                for key, tensor in list(state.items()):
                    if isinstance(tensor, torch.Tensor) and tensor.dim():
                        tensor[offsets[~good].to(tensor.device)] = 0
                    else:  # a threshold, which may be infinite too: selection begins anew
                        del state[key]
            self.memories.of("residual", position)  # also if nothing of the tensor comes back
            self.restore([SparseSlice(piece.span, offsets[good], piece.values[good])])
        return name

    def take_residuals(self, group: range) -> list[SparseSlice]:
        """Take everything out of these tensors' residuals."""
        sent, numbers = [], self._groups.numbers_of(self._model.parameters)
        for position in group:
            parameter = self._model.parameters[position]
            number = int(numbers[position])
            if number < 0 or "residual" not in self.memories.states.get(parameter, ()):
                continue
            recurrence = self._method.recurrence(self._groups.values(number))
            self._shares[position] = recurrence.share
            residual = self.memories.of("residual", position)
            offsets = residual.nonzero().view(-1)
            values = residual[offsets].float()
            residual[offsets] = (recurrence.keep * values).to(residual.dtype)
            sent.append(SparseSlice(self._model.layout.span(position), offsets, recurrence.unit * values))
        return sent

    def fill_memories(self) -> None:
        """Have every memory that the method keeps between steps, zeros if it has none yet.

        A state has the same tensors at all times then, as ``torch.distributed.checkpoint`` needs it.
        """
        for position, number in enumerate(self._groups.numbers_of(self._model.parameters).tolist()):
            if number < 0 or not self._model.parameters[position].numel():
                continue
            recurrence = self._method.recurrence({**self._groups.all[number], "lr": 1.0})
            if not recurrence.whole:
                self.memories.of("residual", position)
            if recurrence.factor:
                self.memories.of("momentum", position)

    def take_off_unsent(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Take off the parameters what their residuals would send; yields each one, and its values, before it is."""
        self._groups.read()
        numbers = self._groups.numbers_of(self._model.parameters)
        for parameter, number in zip(self._model.parameters, numbers.tolist(), strict=True):
            residual = self.memories.states.get(parameter, {}).get("residual")
            if number >= 0 and residual is not None:
                memory = parameter.data  # its writes are not the user's
                yield memory, memory.clone()
                unit = self._method.recurrence(self._groups.values(number)).unit
                memory.sub_(residual.reshape(memory.shape).to(memory.device), alpha=unit)

    def restore(self, slices: Iterable[SparseSlice], *, at_once: bool = True) -> None:
        """Add entries that did not arrive to the residuals again, each times its tensor's share.

        ``at_once``: the next push looks at them, also if they are of rows that no gradient names then. Errors of
        quantisation wait until one does.
        """
        for each in slices:
            piece = each.cpu()
            self._restore(piece)
            for position, part in self._by_tensor([piece]) if at_once and self._by_rows else ():
                if position in self._by_rows:
                    self._owe(position, part)

    def _owe(self, position: int, lost: SparseSlice) -> None:
        shape, start = self._model.layout.parameters[position].shape, self._model.layout.offsets[position]
        first = lost.span.start - start
        offsets = np.arange(lost.entries) if lost.offsets is None else lost.offsets.numpy()
        rows = np.unique((offsets + first) // (int(self._model.sizes[position]) // shape[0]))
        self._owed[position] = np.union1d(self._owed.get(position, rows), rows)

    def _restore(self, lost: SparseSlice) -> None:
        touched, (start, end) = self._model.layout.positions(lost.span), (lost.span.start, lost.span.end)
        if not touched:
            return
        edges = np.array(self._model.layout.offsets[touched.start : touched.stop + 1])
        values, offsets = lost.values.numpy(), None if lost.offsets is None else lost.offsets.numpy()
        counts = np.diff(edges.clip(start, end) if offsets is None else np.searchsorted(offsets, edges - start))
        shares = self._shares[touched.start : touched.stop]
        returned = values * (shares[:1] if (shares == shares[0]).all() else np.repeat(shares, counts))
        found = np.flatnonzero(counts) + touched.start
        on_host = found[self._on_host[found]]
        if on_host.size:
            self.memories.require("residual", tuple(on_host.tolist()))
            part = self.memories.stored("residual")[start:end]
            where, back = slice(None) if offsets is None else offsets, returned
            if on_host.size < found.size:
                mine = np.repeat(self._on_host[touched.start : touched.stop], counts)
                where, back = np.flatnonzero(mine) if offsets is None else offsets[mine], returned[mine]
            part[where] = self.memories.kept(self.memories.read(part[where]) + back)
        for device, kernels in self._kernels.items():
            targets = np.zeros(len(self._model.parameters), TARGET)
            for position in found.tolist():
                if self._model.parameters[position].device == device:
                    targets["address"][position] = self.memories.of("residual", position).data_ptr()
            targets["master"] = targets["address"]
            again = SparseSlice(lost.span, lost.offsets, torch.from_numpy(returned))
            scatter(kernels, self._model.layout, targets, [again], adds=True)

    def _by_tensor(self, slices: Iterable[SparseSlice]) -> Iterable[tuple[int, SparseSlice]]:
        """Yield (position, part) of each tensor that a slice has entries of."""
        for each in slices:
            for position, common in self._model.layout.overlapping(each.span):
                piece = each.clip(common)
                if piece is not None:
                    yield position, piece

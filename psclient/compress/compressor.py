"""From gradients to entries to send, and back: the residuals get what did not arrive."""

from collections.abc import Iterable, Mapping, MutableMapping

import numpy as np
import torch

from psclient.buckets.planner import BucketPlanner
from psclient.compress import rows
from psclient.compress.buffer import WholeBuffer
from psclient.compress.choice import Choice
from psclient.compress.groups import ParamGroups
from psclient.compress.memories import Memories
from psclient.compress.method import Method, State
from psclient.compress.rows import Row
from psclient.compress.table import Rule, Sent, Table
from psclient.errors import UpdateOverflowError
from psclient.model.module import TrainedModel
from psclient.report import StepReport
from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.select.kernels.segments import Integers
from pscore.select.warm import warm


class Compressor:
    """Compresses a model's gradients, group by group, and restores what did not arrive.

    ``states`` has each parameter's state; :attr:`memories` may get others between two steps.
    """

    def __init__(
        self,
        method: type[Method],
        model: TrainedModel,
        states: MutableMapping[torch.Tensor, State],
        groups: ParamGroups,
        choice: Choice,
        planner: BucketPlanner,
    ) -> None:
        self.memories = Memories(model.layout, model.parameters, states)
        self._method, self._model, self._choice = method, model, choice
        self._groups, self._planner = groups, planner
        self._shares = np.zeros(len(model.parameters), np.float32)  # of the last update; at most one push is under way
        self._tables: dict[tuple[int, ...], Table] = {}
        self._generation = -1  # of the param groups, as the tables have them
        self._buffer = WholeBuffer(model.layout.size)
        self._on_host = np.array([parameter.device.type == "cpu" for parameter in model.parameters])
        self._is_compiled = (
            choice.selector is warm and choice.over == "tensor" and model.layout.size >= choice.compiled_from
        )

    def compress(self, group: range, gradients: Mapping[int, torch.Tensor], scale: float, report: StepReport) -> Sent:
        """Return what the tensors of a group send that have a gradient (finite), ascending within a device.

        Raises:
            UpdateOverflowError: gradient times learning rate has left the range of fp32; what had been selected is
                restored, without the entries concerned.
        """
        layout = self._model.layout
        numbers = self._group_numbers()
        positions = [position for position in group if position in gradients and numbers[position] >= 0]
        where = np.array(positions, np.int64)
        rules = {}
        for number in sorted(set(numbers[where].tolist())):
            values = self._groups.values(number)
            rules[number] = Rule(self._method.recurrence(values), values["density"])
            self._shares[where[numbers[where] == number]] = rules[number].recurrence.share
        densities = {
            position: density
            for position, density in self._planner.densities.items()
            if not self._groups.has_own_density(int(numbers[position]))
        }
        on_table = self._on_host[where] & self._is_compiled
        sent = Sent([], {}, is_finite=True)
        if on_table.any():
            span = Span(layout.offsets[group.start], layout.offsets[group.stop])
            sent = self._table(positions if on_table.all() else where[on_table].tolist(), numbers, span).compress(
                rules, densities, gradients, self._model.parameters, scale, self.memories, self._buffer, self._choice,
                report,
            )  # fmt: skip
        alike: dict[torch.device, list[Row]] = {}
        for position in where[~on_table].tolist():
            recurrence, density = rules[int(numbers[position])]
            row = Row(position, layout.span(position), recurrence, densities.get(position, density))
            alike.setdefault(self._model.parameters[position].device, []).append(row)
        is_finite = sent.is_finite
        for same in alike.values():
            found = rows.compress(same, gradients, self._model.parameters, scale, self.memories, self._choice, report)
            for position, piece in sorted(found.items()):
                sent.slices.append(piece)
                sent.entries[position] = piece.entries
                is_finite &= bool(piece.values.isfinite().all())
        if not is_finite:
            raise UpdateOverflowError(self._without_overflow(sent.slices))
        return sent

    def _group_numbers(self) -> Integers:
        """Return the number of each parameter's group, -1 for none; tables of other groups are forgotten."""
        if self._generation != self._groups.generation:
            self._generation = self._groups.generation
            found = [self._groups.number_of(parameter) for parameter in self._model.parameters]
            self._numbers = np.array([-1 if number is None else number for number in found])
            self._tables.clear()
        return self._numbers

    def _table(self, positions: list[int], numbers: Integers, span: Span) -> Table:
        key = (span.start, span.end, *positions)
        if key not in self._tables:
            self._tables[key] = Table(self._model.layout, positions, numbers[positions], span)
        return self._tables[key]

    def _without_overflow(self, sent: Iterable[SparseSlice]) -> str:
        """Restore the finite entries and clear the others in all memories; return the name of a tensor of theirs."""
        name = ""
        for position, piece in self._by_tensor(sent):
            good = piece.values.isfinite()
            offsets = torch.arange(len(good), device=good.device) if piece.offsets is None else piece.offsets
            if not bool(good.all()):
                name = self._model.layout.parameters[position].name
                state = self.memories.state(position)
                for key, tensor in list(state.items()):
                    if isinstance(tensor, torch.Tensor) and tensor.dim():
                        tensor.nan_to_num_(0.0, 0.0, 0.0)[offsets[~good].to(tensor.device)] = 0
                    else:  # a threshold, which may be infinite too: selection begins anew
                        del state[key]
            self.memories.of("residual", position)  # also where nothing of the tensor comes back
            self.restore([SparseSlice(piece.span, offsets[good], piece.values[good])])
        return name

    def take_residuals(self, group: range) -> list[SparseSlice]:
        """Take everything out of these tensors' residuals."""
        sent = []
        for position in group:
            parameter = self._model.parameters[position]
            number = self._groups.number_of(parameter)
            if number is None or "residual" not in self.memories.states.get(parameter, ()):
                continue
            recurrence = self._method.recurrence(self._groups.values(number))
            self._shares[position] = recurrence.share
            sent.append(rows.held(Row(position, self._model.layout.span(position), recurrence, 1.0), self.memories))
        return sent

    def restore(self, slices: Iterable[SparseSlice]) -> None:
        """Add entries that did not arrive to the residuals again, each times its tensor's share."""
        for each in slices:
            if bool(self._on_host.all()):
                self._restore_at_once(each)
            else:
                self._restore_by_tensor(each)

    def _restore_at_once(self, lost: SparseSlice) -> None:
        """Restore a slice where all tensors are on the host, and so are their residuals in one array."""
        touched, (start, end) = self._model.layout.positions(lost.span), (lost.span.start, lost.span.end)
        if not touched:
            return
        edges = np.array(self._model.layout.offsets[touched.start : touched.stop + 1])
        values, offsets = lost.values.numpy(), None if lost.offsets is None else lost.offsets.numpy()
        counts = np.diff(edges.clip(start, end) if offsets is None else np.searchsorted(offsets, edges - start))
        self.memories.require("residual", (np.flatnonzero(counts) + touched.start).tolist())
        shares = self._shares[touched.start : touched.stop]
        returned = values * (shares[:1] if (shares == shares[0]).all() else np.repeat(shares, counts))
        self.memories.flat("residual")[start:end][slice(None) if offsets is None else offsets] += returned

    def _restore_by_tensor(self, lost: SparseSlice) -> None:
        for position, piece in self._by_tensor([lost]):
            span = self._model.layout.span(position)
            residual = self.memories.of("residual", position)
            part = residual[piece.span.start - span.start : piece.span.end - span.start]
            values, share = piece.values.to(residual.device), float(self._shares[position])
            if piece.offsets is None:
                part.add_(values, alpha=share)
            else:
                part.index_add_(0, piece.offsets.to(residual.device), values, alpha=share)

    def _by_tensor(self, slices: Iterable[SparseSlice]) -> Iterable[tuple[int, SparseSlice]]:
        """Yield (position, part) of each tensor that a slice has entries of."""
        for each in slices:
            for position, common in self._model.layout.overlapping(each.span):
                piece = each.clip(common)
                if piece is not None:
                    yield position, piece

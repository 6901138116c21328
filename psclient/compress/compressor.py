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
        self._tables_of = -1  # generation of the param groups
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
        layout, sent = self._model.layout, Sent([], {})
        numbers = {
            position: number
            for position in group
            if position in gradients
            and (number := self._groups.number_of(self._model.parameters[position])) is not None
        }
        used = sorted(set(numbers.values()))
        rules = {
            number: Rule(self._method.recurrence(values), values["density"])
            for number in used
            for values in [self._groups.values(number)]
        }
        for number, rule in rules.items():
            self._shares[[position for position, own in numbers.items() if own == number]] = rule.recurrence.share
        densities = {
            position: density
            for position, density in self._planner.densities.items()
            if position in numbers and not self._groups.has_own_density(numbers[position])
        }
        span = Span(layout.offsets[group.start], layout.offsets[group.stop])
        table = [position for position in numbers if self._is_compiled and self._on_host[position]]
        if table:
            sent = self._table(table, [numbers[position] for position in table], span).compress(
                rules, densities, gradients, self._model.parameters, scale, self.memories, self._buffer, self._choice,
                report,
            )  # fmt: skip
        alike: dict[torch.device, list[Row]] = {}
        for position in numbers.keys() - table:
            recurrence, density = rules[numbers[position]]
            row = Row(position, layout.span(position), recurrence, densities.get(position, density))
            alike.setdefault(self._model.parameters[position].device, []).append(row)
        for same in alike.values():
            same.sort()
            found = rows.compress(same, gradients, self._model.parameters, scale, self.memories, self._choice, report)
            for position, piece in sorted(found.items()):
                sent.slices.append(piece)
                sent.entries[position] = piece.entries
        if not all(_is_finite(piece.values) for piece in sent.slices):
            raise UpdateOverflowError(self._without_overflow(sent.slices))
        return sent

    def _table(self, positions: list[int], numbers: list[int], span: Span) -> Table:
        if self._tables_of != self._groups.generation:
            self._tables.clear()
            self._tables_of = self._groups.generation
        key = (span.start, span.end, *positions)
        if key not in self._tables:
            self._tables[key] = Table(self._model.layout, positions, numbers, span)
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
        for position, piece in self._by_tensor(slices):
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


def _is_finite(values: torch.Tensor) -> bool:
    if values.device.type == "cpu" and values.dtype == torch.float32:
        return bool(np.isfinite(values.numpy()).all())  # on this thread
    return bool(values.isfinite().all())

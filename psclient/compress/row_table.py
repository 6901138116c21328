"""Tensors of which a step has touched some rows: those of ``nn.Embedding(sparse=True)``.

The touched rows are compressed as tensors of their own, so that a step costs these rows and not the tensor. Their
residuals and momenta are copied from the tensor's memories, and back. Hence the difference from a dense gradient of the
same values: nothing is sent of a row that no gradient names, and its momentum does not decay.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from psclient.compress.gradients import Gradients
from psclient.compress.host_table import Choice, Places, Rule, Sent, Table, WholeBuffer
from psclient.compress.residuals import CopiedMemories, Memories
from psclient.errors import ConfigurationError
from psclient.report import StepReport
from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.selection.rule import Integers


class RowTable:
    """The tensors of a group whose gradients name their rows.

    Attributes:
        positions: in the layout, ascending.
    """

    def __init__(self, layout: ModelLayout, positions: Integers, numbers: Integers) -> None:
        self.positions = positions
        self._layout, self._numbers = layout, numbers

    def compress(
        self,
        rules: Mapping[int, Rule],
        densities: Mapping[int, float],
        gradients: Gradients,
        owed: Mapping[int, Integers],
        parameters: Sequence[torch.Tensor],
        clip: float,
        memories: Memories,
        choice: Choice,
        report: StepReport,
    ) -> Sent:
        """Carry out the updates of the touched rows, and of the ``owed`` ones, and select from them.

        ``owed`` has rows by position, ascending, whose residuals are looked at although no gradient names them. Nothing
        has changed after an error.

        Raises:
            ConfigurationError: a tensor has a weight decay, which changes every row in every step.
        """
        for position, number in zip(self.positions.tolist(), self._numbers.tolist(), strict=True):
            if rules[number].recurrence.decay:
                raise ConfigurationError(
                    f"{self._layout.parameters[position].name!r} has a sparse gradient, and weight_decay changes every "
                    "row in every step: give it a param group with weight_decay=0, or make its module with sparse=False"
                )
        named = {n: _with(gradients[n], gradients.rows[n], owed.get(n)) for n in self.positions.tolist()}
        used = np.array([rows.size > 0 for _, rows in named.values()], bool)
        positions = self.positions[used]
        entries = dict.fromkeys(self.positions.tolist(), 0)
        if not positions.size:
            return Sent([], entries, is_finite=True)
        of_rows = Gradients({n: named[n][0] for n in positions.tolist()})
        touched = TouchedRows(memories, self._layout, positions, [named[n][1] for n in positions.tolist()])
        spans = [self._layout.span(n).length for n in positions.tolist()]
        places = Places(
            positions,
            self._numbers[used],
            np.arange(positions.size),
            touched.starts[:-1],
            np.diff(touched.starts),
            np.array(spans, np.int64),
            touched.span,
        )
        buffer = WholeBuffer(touched.span.length)
        sent = Table(places).compress(rules, densities, of_rows, parameters, clip, touched, buffer, choice, report)
        touched.write_back()
        return Sent(touched.placed(sent.slices), entries | sent.entries, sent.is_finite)


class TouchedRows(CopiedMemories):
    """The memories of some rows of some tensors, end to end.

    ``rows`` has, for each of the positions, int64 ``[t]``, ascending, one row or more.

    Attributes:
        starts: where the rows of each tensor begin, int64 ``[m + 1]``, in elements; and the end.
    """

    def __init__(self, memories: Memories, layout: ModelLayout, positions: Integers, rows: Sequence[Integers]) -> None:
        self._layout, self._positions, self._rows = layout, positions.tolist(), rows
        counts = [layout.parameters[position].shape[0] for position in self._positions]
        self._columns = [layout.span(n).length // count for n, count in zip(self._positions, counts, strict=True)]
        sizes = [each.size * columns for each, columns in zip(rows, self._columns, strict=True)]
        self.starts = np.cumsum([0, *sizes])
        super().__init__(memories, Span(0, int(self.starts[-1])))

    def part_of(self, position: int) -> slice:
        """Return where the rows of a tensor are."""
        number = self._positions.index(position)
        return slice(int(self.starts[number]), int(self.starts[number + 1]))

    def taken(self, stored: NDArray[Any], position: int) -> NDArray[Any]:
        """Return the rows of a tensor, ``[t, columns]``."""
        table, rows = self._table(stored, position)
        return np.take(table, rows, axis=0)

    def put(self, stored: NDArray[Any], position: int, kept: NDArray[Any]) -> None:
        """Set the rows of a tensor."""
        table, rows = self._table(stored, position)
        table[rows] = kept.reshape(-1, table.shape[1])

    def placed(self, slices: Sequence[SparseSlice]) -> list[SparseSlice]:
        """Return entries of the rows as entries of the layout: a slice of each tensor's span that has some."""
        found = []
        for each in slices:
            start, offsets = each.span.start, None if each.offsets is None else each.offsets.numpy()
            edges = self.starts.clip(start, each.span.end) - start
            bounds = edges if offsets is None else np.searchsorted(offsets, edges)
            for number in np.flatnonzero(np.diff(bounds)).tolist():
                low, high = int(bounds[number]), int(bounds[number + 1])
                rows, columns = self._rows[number], self._columns[number]
                if offsets is None:
                    assert high - low == rows.size * columns, "a tensor is sent whole or by entries"
                    where = (rows[:, None] * columns + np.arange(columns)).reshape(-1)
                else:
                    row, column = np.divmod(offsets[low:high] + (start - self.starts[number]), columns)
                    where = rows[row] * columns + column
                span = self._layout.span(self._positions[number])
                found.append(SparseSlice(span, torch.from_numpy(where), each.values[low:high]))
        return found

    def _table(self, stored: NDArray[Any], position: int) -> tuple[NDArray[Any], Integers]:
        """Return a tensor's own memory, ``[rows, columns]``, and which of its rows are touched."""
        number, span = self._positions.index(position), self._layout.span(position)
        return stored[span.start : span.end].reshape(-1, self._columns[number]), self._rows[number]


def _with(gradient: torch.Tensor, rows: Integers, owed: Integers | None) -> tuple[torch.Tensor, Integers]:
    """Return a gradient ``[t, …]`` of rows, and these; with zeros for the rows that are owed and that it has not."""
    more = np.setdiff1d(owed, rows, assume_unique=True) if owed is not None else rows[:0]
    if not more.size:
        return gradient, rows
    every = np.union1d(rows, more)
    values = gradient.new_zeros((every.size, *gradient.shape[1:]))
    values[torch.from_numpy(np.searchsorted(every, rows)).to(gradient.device)] = gradient
    return values, every

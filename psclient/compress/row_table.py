"""Tensors of which a step has touched some rows: those of ``nn.Embedding(sparse=True)``.

The touched rows are compressed as tensors of their own, so that a step costs these rows and not the tensor. Their
residuals and momenta are copied from the tensor's memories, and back. Hence the difference from a dense gradient of the
same values: nothing is sent of a row that no gradient names, and its momentum does not decay.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from psclient.compress.gradients import Gradients
from psclient.compress.host_table import Choice, Places, Rule, Sent, Table, WholeBuffer
from psclient.compress.method import State
from psclient.compress.residuals import Memories, TableMemories
from psclient.errors import ConfigurationError
from psclient.report import StepReport
from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.selection.rule import Integers, Reals


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
            Span(0, touched.size),
        )
        buffer = WholeBuffer(touched.size)
        sent = Table(places).compress(rules, densities, of_rows, parameters, clip, touched, buffer, choice, report)
        touched.write_back()
        return Sent(touched.placed(sent.slices), entries | sent.entries, sent.is_finite)


class TouchedRows(TableMemories):
    """The memories of some rows of some tensors, end to end; :meth:`write_back` copies them into the tensors' own.

    ``rows`` has, for each of the positions, int64 ``[t]``, ascending, one row or more.

    Attributes:
        starts: where the rows of each tensor begin, int64 ``[m + 1]``, in elements; and the end.
        size: elements of all.
    """

    def __init__(self, memories: Memories, layout: ModelLayout, positions: Integers, rows: Sequence[Integers]) -> None:
        self._memories, self._layout = memories, layout
        self._positions, self._rows = positions.tolist(), rows
        counts = [layout.parameters[position].shape[0] for position in self._positions]
        self._columns = [layout.span(n).length // count for n, count in zip(self._positions, counts, strict=True)]
        sizes = [each.size * columns for each, columns in zip(rows, self._columns, strict=True)]
        self.starts = np.cumsum([0, *sizes])
        self.size = int(self.starts[-1])
        self._flat: dict[str, Reals] = {}
        self._copied: set[tuple[str, int]] = set()  # names of memories, and numbers of tensors

    def flat(self, name: str) -> Reals:
        """Return the memories of all rows; meaningful for tensors of which they were required."""
        if name not in self._flat:
            self._flat[name] = np.zeros(self.size, np.float32)
        return self._flat[name]

    def states_of(self, positions: tuple[int, ...]) -> list[State]:
        """Return the states of some parameters."""
        return self._memories.states_of(positions)

    def has(self, name: str, positions: tuple[int, ...]) -> list[bool]:
        """Tell of each parameter whether it has this memory."""
        return self._memories.has(name, positions)

    def require(self, name: str, positions: tuple[int, ...]) -> None:
        """Have these memories, those of the rows copied; zero if there was none."""
        self._memories.require(name, positions)
        flat = self.flat(name)
        for number, position in enumerate(self._positions):
            if position in positions and (name, number) not in self._copied:
                self._copied.add((name, number))
                np.take(self._table(name, number), self._rows[number], axis=0, out=self._part(flat, number))

    def clear(self, name: str, positions: tuple[int, ...]) -> None:
        """Make the memories of the rows zero, if there are any."""
        for number, position in enumerate(self._positions):
            if position in positions and (name, number) in self._copied:
                self._part(self._flat[name], number)[...] = 0

    def write_back(self) -> None:
        """Copy the required memories into the tensors' own."""
        for name, number in self._copied:
            self._table(name, number)[self._rows[number]] = self._part(self._flat[name], number)

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

    def _table(self, name: str, number: int) -> Reals:
        """Return a tensor's own memory, ``[rows, columns]``."""
        span = self._layout.span(self._positions[number])
        return self._memories.flat(name)[span.start : span.end].reshape(-1, self._columns[number])

    def _part(self, flat: Reals, number: int) -> Reals:
        """Return the rows of a tensor, ``[t, columns]``."""
        part: NDArray[np.float32] = flat[self.starts[number] : self.starts[number + 1]]
        return part.reshape(-1, self._columns[number])


def _with(gradient: torch.Tensor, rows: Integers, owed: Integers | None) -> tuple[torch.Tensor, Integers]:
    """Return a gradient ``[t, …]`` of rows, and these; with zeros for the rows that are owed and that it has not."""
    more = np.setdiff1d(owed, rows, assume_unique=True) if owed is not None else rows[:0]
    if not more.size:
        return gradient, rows
    every = np.union1d(rows, more)
    values = gradient.new_zeros((every.size, *gradient.shape[1:]))
    values[torch.from_numpy(np.searchsorted(every, rows)).to(gradient.device)] = gradient
    return values, every

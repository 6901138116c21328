"""Selection from all tensors of a table on the host: one pass adds each one's gradient to its memory and takes entries.

A table has a row for each tensor. It is cut into pieces of a fixed size, which are spread over threads: no sum depends
on the number of threads.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pscore.selection.exact import SelectFunction
from pscore.selection.host.threads import in_parallel, parts_of
from pscore.selection.rule import (
    CHANCE,
    ROOM,
    SMALL_SIZE,
    Integers,
    Reals,
    SelectorState,
    deviation,
    remember,
    threshold_of,
)

PIECE = 1 << 16  # elements

ROW = np.dtype(
    [
        ("gradient", "i8"),
        ("parameters", "i8"),
        ("start", "i8"),
        ("scale", "f4"),
        ("decay", "f4"),
        ("factor", "f4"),
        ("retain", "f4"),
        ("rate", "f4"),
        ("unit", "f4"),
        ("threshold", "f4"),
        ("keep", "f4"),
        ("gradient_kind", "i1"),
        ("parameter_kind", "i1"),
        ("searched", "?"),
        ("whole", "?"),
        ("has_residual", "?"),
    ],
    align=True,
)
"""A tensor: addresses of gradient and parameters (0 for no decay), where it starts in the memories, coefficients and
threshold. A ``whole`` tensor is written out and not selected from; ``has_residual``: its memory is not zero. If
``searched`` is false, the output must have room for every element.

The coefficients are those of :class:`psclient.compress.method.Recurrence`."""

_PIECE = np.dtype([("row", "i8"), ("first", "i8"), ("size", "i8"), ("room", "i8")], align=True)

KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Dtypes of gradients and parameters, as the loops number them."""


NOTHING: Reals = np.zeros(0, np.float32)


class Selected(NamedTuple):
    """The entries that were taken, ascending over all tensors.

    Attributes:
        offsets: int64, counted as the memory; ``None``: every element, up to the last.
        values: fp32, the memory's values before.
        counts: of the entries of each row.
        is_finite: whether all that was found above the thresholds is.
    """

    offsets: Integers | None
    values: Reals
    counts: Integers
    is_finite: bool


class _Passed(NamedTuple):
    """What a pass has taken, and counts a row.

    Attributes:
        offsets, values: as of :class:`Selected`.
        above: entries above the threshold, of each row.
        taken: of these the ones that were taken: fewer if there was no room.
        excess: what the magnitudes above the threshold exceed it by, summed, of each row.
    """

    offsets: Integers | None
    values: Reals
    above: Integers
    taken: Integers
    excess: NDArray[np.float64]


def numbered(counts: Integers) -> tuple[Integers, Integers, Integers]:
    """Number the parts of things that have so many: each thing's first, and of each part its thing and place in it."""
    first = np.cumsum(counts) - counts
    things = np.repeat(np.arange(counts.size), counts)
    return first, things, np.arange(things.size) - first[things]


class _Pieces:
    """The pieces of tensors of these sizes, none of which is 0."""

    def __init__(self, sizes: Integers) -> None:
        self.starts, rows, number = numbered(-(-sizes // PIECE))
        self.table: NDArray[Any] = np.zeros(rows.size, _PIECE)
        self.table["row"], self.table["first"] = rows, number * PIECE
        self.table["size"] = np.minimum(PIECE, sizes[rows] - self.table["first"])
        ends = np.cumsum(self.table["size"])
        parts = parts_of(int(ends[-1]))
        cuts = [0, *np.searchsorted(ends, [ends[-1] * part // parts for part in range(1, parts)]).tolist(), rows.size]
        self.ranges = [slice(low, high) for low, high in pairwise(cuts) if low < high]
        self.room = [0 for _ in self.ranges]

    def make_room(self, rooms: Integers) -> None:
        """Let a tensor take this many entries from one of its pieces."""
        self.table["room"] = np.minimum(self.table["size"], rooms[self.table["row"]])
        self.room = [int(self.table["room"][part].sum()) for part in self.ranges]


class HostSegments:
    """Tensors on the host, one row each, that are updated and selected from together.

    ``rows`` are of :data:`ROW` or more; addresses, starts and coefficients are the caller's.
    """

    def __init__(self, sizes: Integers) -> None:
        self.rows: NDArray[Any] = np.zeros(sizes.size, ROW)
        self._sizes, self._pieces = sizes, _Pieces(sizes)
        for name in ("scale", "retain", "rate", "unit"):
            self.rows[name] = 1

    def want(self, wanted: Integers) -> None:
        """Set how many entries are wanted of each row that is ``searched``; the others send all that they have."""
        self._wanted = wanted
        self._off = deviation(wanted, CHANCE * (self._sizes <= SMALL_SIZE))
        self._searched = self.rows["searched"].copy()
        self._pieces.make_room(np.where(self._searched, ROOM * wanted, self._sizes))

    def write_out(self, clip: float, memory: Reals, momentum: Reals, whole: Reals) -> None:
        """Update rows that are all ``whole``: their values go to ``whole``, laid out as the memory."""
        self._update(clip, memory, momentum, whole)

    def select(
        self,
        clip: float,
        memory: Reals,
        momentum: Reals,
        states: Mapping[int, SelectorState],
        selector: SelectFunction | None = None,
    ) -> Selected:
        """Add ``clip`` times the gradients to the memories, and take entries.

        If what is taken is not finite, nothing is corrected: the caller puts everything back.

        Args:
            clip: a factor of all gradients.
            memory: residuals, of which each row's begin at its ``start``; changed. Entries are counted as these are.
            momentum: laid out as the memory; changed if a row has a ``factor``.
            states: of the rows that are searched.
            selector: of their entries; ``None`` for the rule of :mod:`pscore.selection.rule`.
        """
        rows, searched = self.rows, np.flatnonzero(self._searched).tolist()
        thresholds, drifts = np.zeros((2, rows.size))
        if selector is None:
            thresholds[searched] = [threshold_of(states[row]) for row in searched]
        else:
            thresholds[searched] = np.inf
        rows["threshold"][searched] = thresholds[searched]
        passed = self._update(clip, memory, momentum, NOTHING)
        is_finite = bool(np.isfinite(passed.excess).all())
        if not searched or not is_finite:
            return Selected(passed.offsets, passed.values, passed.taken, is_finite)
        offsets = np.arange(passed.values.size) if passed.offsets is None else passed.offsets
        if selector is not None:
            return self._choose(passed._replace(offsets=offsets), memory, selector)
        drifts[searched] = [states[row].get("drift", 0.0) for row in searched]
        ranked = np.zeros(rows.size, np.int64)
        ranked[searched] = [int(states[row].get("ranked", 0)) for row in searched]
        found = self._correct(passed._replace(offsets=offsets), memory, thresholds, drifts, ranked)
        columns = (each[searched].tolist() for each in (thresholds, drifts, ranked))
        for row, *kept in zip(searched, *columns, strict=True):
            remember(states[row], *kept)
        return found

    def _update(self, clip: float, memory: Reals, momentum: Reals, whole: Reals) -> _Passed:
        """Update the memories, and take what lies above each row's threshold, or write it out."""
        from pscore.selection.host import update_loops

        rows, pieces = self.rows, self._pieces
        above, taken = np.empty((2, pieces.table.size), np.int64)
        excess = np.empty(pieces.table.size)

        def loop(part: slice) -> tuple[int, Integers, Reals]:
            room = pieces.room[pieces.ranges.index(part)]
            offsets, values = np.empty(room, np.int64), np.empty(room, np.float32)
            found, first = update_loops.update(
                rows, pieces.table, part.start, part.stop, np.float32(clip), memory, momentum, whole,
                offsets, values, above, taken, excess,
            )  # fmt: skip
            return first, offsets[:found], values[:found]  # pages that were never touched are no memory

        parts = in_parallel(pieces.ranges, loop)
        values = _joined([each for _, _, each in parts])
        ends = np.cumsum([0, *(each.size for _, _, each in parts)]).tolist()
        is_dense = all(first == end for (first, _, _), end in zip(parts, ends, strict=False))
        for first, offsets, _ in () if is_dense else parts:
            if first >= 0:
                offsets[:] = np.arange(first, first + offsets.size)
        return _Passed(
            None if is_dense else _joined([offsets for _, offsets, _ in parts]),
            values,
            np.add.reduceat(above, pieces.starts),
            np.add.reduceat(taken, pieces.starts),
            np.add.reduceat(excess, pieces.starts),
        )

    def _correct(
        self,
        passed: _Passed,
        memory: Reals,
        thresholds: NDArray[np.float64],
        drifts: NDArray[np.float64],
        ranked: Integers,
    ) -> Selected:
        """Correct the rows whose number of entries misses ``k``; set thresholds, drifts and steps of the next."""
        from pscore.selection.host import rule_loops

        searched, wanted, off, above = self._searched, self._wanted, self._off, passed.above
        misses = np.isinf(thresholds) | (above > wanted + off) | ((above < wanted - off) & (thresholds != 0))
        moves = bool((misses & searched).any())
        size = int(np.maximum(passed.taken, searched * (wanted + off + 2).astype(np.int64)).sum()) if moves else 0
        offsets, values = np.empty(size, np.int64), np.empty(size, np.float32)
        total = rule_loops.correct(
            self.rows, searched, self._sizes, wanted, off, memory, thresholds, drifts, ranked, above,
            passed.excess, passed.taken, passed.offsets, passed.values, offsets, values, moves,
        )  # fmt: skip
        if not moves:
            return Selected(passed.offsets, passed.values, passed.taken, True)
        return Selected(offsets[:total], values[:total], passed.taken, True)

    def _choose(self, passed: _Passed, memory: Reals, selector: SelectFunction) -> Selected:
        """Let a selector choose from the rows that are searched, of which the pass has taken nothing."""
        assert passed.offsets is not None
        pieces: list[tuple[Integers, Reals]] = []
        ends, done = np.cumsum(passed.taken).tolist(), 0
        for row in np.flatnonzero(self._searched).tolist():
            start = int(self.rows["start"][row])
            x = memory[start : start + int(self._sizes[row])]
            chosen = selector(x, int(self._wanted[row]))
            values = x[chosen]
            x[chosen] = self.rows["keep"][row] * values
            pieces.append((passed.offsets[done : ends[row]], passed.values[done : ends[row]]))
            pieces.append((chosen + start, values))
            passed.taken[row], done = chosen.size, ends[row]
        pieces.append((passed.offsets[done:], passed.values[done:]))
        offsets, values = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        return Selected(offsets, values, passed.taken, True)


def first_not_finite(addresses: Integers, kinds: NDArray[np.int8], sizes: Integers) -> int | None:
    """Return the number of the first tensor with an element that is not finite; ``kinds`` as in :data:`KINDS`."""
    if not sizes.size:
        return None
    from pscore.selection.host import update_loops

    if parts_of(int(sizes.sum())) == 1:
        ranges, columns = [slice(0, sizes.size)], [np.arange(sizes.size), np.zeros(sizes.size, np.int64), sizes]
    else:
        pieces = _Pieces(sizes)
        ranges = pieces.ranges
        columns = [np.ascontiguousarray(pieces.table[name]) for name in ("row", "first", "size")]

    def loop(part: slice) -> int | None:
        found = update_loops.first_not_finite(addresses, kinds, *(column[part] for column in columns))
        return None if found < 0 else int(columns[0][part][found])

    return next((found for found in in_parallel(ranges, loop) if found is not None), None)


def _joined(parts: Any) -> Any:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)

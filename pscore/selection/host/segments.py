"""One pass over many tensors on the host: add each one's gradient to its memory, and take the entries above thresholds.

A table has a row for each tensor. It is cut into pieces of a fixed size, which are spread over threads: no sum depends
on the number of threads.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pscore.selection.kernels.cpu import in_parallel, parts_of

Integers = NDArray[np.int64]
Reals = NDArray[np.float32]

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


class Passed(NamedTuple):
    """The entries that a pass has taken, ascending over all tensors, and counts a row.

    Attributes:
        offsets: int64, counted from the table's base; ``None`` if every element from there on, up to the last, is
            taken.
        values: fp32, the memory's values before.
        above: entries above the threshold, of each row.
        taken: of these the ones that were taken: fewer if there was no room.
        excess: what the magnitudes above the threshold exceed it by, summed, of each row.
    """

    offsets: Integers | None
    values: Reals
    above: Integers
    taken: Integers
    excess: NDArray[np.float64]


class Pieces:
    """The pieces of tensors of these sizes, none of which is 0."""

    def __init__(self, sizes: Integers) -> None:
        counts = -(-sizes // PIECE)
        self.starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        self.table: NDArray[Any] = np.zeros(int(counts.sum()), _PIECE)
        rows = np.repeat(np.arange(sizes.size), counts)
        self.table["row"] = rows
        self.table["first"] = (np.arange(rows.size) - self.starts[rows]) * PIECE
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


def update(
    rows: NDArray[Any],
    pieces: Pieces,
    clip: float,
    memory: Reals,
    momentum: Reals,
    whole: Reals,
    base: int,
) -> Passed:
    """Add ``clip`` times the gradients to the memories, and take what lies above each row's threshold, or write it out.

    Args:
        rows: of :data:`ROW`, ascending in ``start``.
        pieces: of the rows' sizes, with room for the entries.
        clip: a factor of all gradients.
        memory: residuals of all tensors, end to end; changed.
        momentum: laid out as the memory; changed if a row has a ``factor``.
        whole: of the tensors that are sent whole, laid out as the memory from ``base`` on; changed.
        base: from which entries are counted.
    """
    from pscore.selection.host import segment_loops

    table = pieces.table
    above, taken = np.empty((2, table.size), np.int64)
    excess = np.empty(table.size)

    def loop(part: slice) -> tuple[int, Integers, Reals]:
        room = pieces.room[pieces.ranges.index(part)]
        offsets, values = np.empty(room, np.int64), np.empty(room, np.float32)
        found, first = segment_loops.update(
            rows, table, part.start, part.stop, np.float32(clip), memory, momentum, whole, base,
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
    return Passed(
        None if is_dense else _joined([offsets for _, offsets, _ in parts]),
        values,
        np.add.reduceat(above, pieces.starts),
        np.add.reduceat(taken, pieces.starts),
        np.add.reduceat(excess, pieces.starts),
    )


def first_not_finite(addresses: Integers, kinds: NDArray[np.int8], sizes: Integers) -> int | None:
    """Return the number of the first tensor with an element that is not finite; ``kinds`` as in :data:`KINDS`."""
    if not sizes.size:
        return None
    from pscore.selection.host import segment_loops

    if parts_of(int(sizes.sum())) == 1:
        ranges, columns = [slice(0, sizes.size)], [np.arange(sizes.size), np.zeros(sizes.size, np.int64), sizes]
    else:
        pieces = Pieces(sizes)
        ranges = pieces.ranges
        columns = [np.ascontiguousarray(pieces.table[name]) for name in ("row", "first", "size")]

    def loop(part: slice) -> int | None:
        found = segment_loops.first_not_finite(addresses, kinds, *(column[part] for column in columns))
        return None if found < 0 else int(columns[0][part][found])

    return next((found for found in in_parallel(ranges, loop) if found is not None), None)


def _joined(parts: Any) -> Any:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)

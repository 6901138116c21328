"""The compiled loop of :mod:`pscore.selection.cuda.launches`: the entries of a device's output."""

# mypy: ignore-errors

from pscore.jit import compiled


@compiled
def collect(rows, starts, counts, taken, rooms, inner, values, offsets, kept):
    """Write the entries of accepted rows, end to end, to ``offsets`` (int64) and ``kept`` (fp32).

    Piece after piece: ``rows`` has the row of each, ``starts`` where its offsets count from, ``counts`` its entries. A
    row's entries begin at its place in ``rooms``: places within their pieces, ``inner``, and ``values``. A row with
    ``taken`` below 0 has none.
    """
    total, place, row = 0, 0, -1
    for piece in range(rows.size):
        if rows[piece] != row:
            row = rows[piece]
            place = rooms[row]
        if taken[row] < 0:
            continue
        start = starts[piece]
        for i in range(counts[piece]):
            offsets[total + i] = start + inner[place + i]
            kept[total + i] = values[place + i]
        total += counts[piece]
        place += counts[piece]

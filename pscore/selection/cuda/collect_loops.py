"""The compiled loop of :mod:`pscore.selection.cuda.launches`: the entries of a device's output."""

# mypy: ignore-errors

import numpy as np

from pscore.jit import compiled


@compiled
def collect(low, high, starts, ends, of_values, of_places, offsets, values):
    """Write the entries of the lines ``[low, high)`` to ``offsets`` (int64) and ``values`` (fp32).

    ``of_values`` and ``of_places`` have a row for each line: values, and places within the piece. ``starts`` has where
    each piece's offsets count from, ``ends`` where its entries end.
    """
    width = of_values.shape[1]
    piece = np.searchsorted(ends, low * width, "right")
    for line in range(low, high):
        base = line * width
        count = min(width, offsets.size - base)
        for i in range(count):
            values[base + i] = of_values[line, i]
        done = 0
        while done < count:
            start, stop = starts[piece], min(ends[piece] - base, count)
            for i in range(done, stop):
                offsets[base + i] = start + of_places[line, i]
            done = stop
            if ends[piece] == base + done:
                piece += 1
                while piece < ends.size and ends[piece] == base + done:
                    piece += 1

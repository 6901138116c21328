"""The compiled loops of :mod:`psclient.model.replica`, which imports them when it needs them."""

# mypy: ignore-errors

import numpy as np

from pscore.jit import compiled
from pscore.pointers import float32_at


@compiled
def write_at(addresses, starts, bounds, offsets, values, base, adds):
    """Write values, or add them, to fp32 tensors.

    Entries ``[bounds[i], bounds[i + 1])`` belong to the tensor at ``addresses[i]`` (0: to none that is written here),
    which starts at ``starts[i]`` of the layout; offsets count from ``base``.
    """
    for i in range(addresses.size):
        if addresses[i] == 0 or bounds[i] == bounds[i + 1]:
            continue
        shift = base - starts[i]
        x = float32_at(addresses[i], np.int64(1) << 62)
        if adds:
            for j in range(bounds[i], bounds[i + 1]):
                x[offsets[j] + shift] += values[j]
        else:
            for j in range(bounds[i], bounds[i + 1]):
                x[offsets[j] + shift] = values[j]


@compiled
def write_runs(addresses, starts, firsts, ends, values, base, adds):
    """Write values, or add them, to all elements ``[firsts[i], ends[i])`` of the layout, tensor by tensor."""
    for i in range(addresses.size):
        if addresses[i] == 0:
            continue
        count = ends[i] - firsts[i]
        x = float32_at(addresses[i] + 4 * (firsts[i] - starts[i]), count)
        source = values[firsts[i] - base : ends[i] - base]
        if adds:
            for j in range(count):
                x[j] += source[j]
        else:
            for j in range(count):
                x[j] = source[j]


def warm_up():
    """Run every loop once."""
    x, one = np.zeros(1, np.float32), np.ones(1, np.int64)
    at, start = np.array([x.ctypes.data]), 0 * one
    write_at(at, start, np.array([0, 1]), start, x.copy(), 0, True)
    write_runs(at, start, start, one, x.copy(), 0, True)

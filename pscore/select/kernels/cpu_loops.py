"""The compiled loops of :mod:`pscore.select.kernels.cpu`; ``None`` where numba is missing.

Elements are visited in runs whose comparisons are joined before one branch is taken: at the densities in question most
runs hold nothing, and the compiler makes vector instructions of the rest. Each array passes through memory once.

An argument may be ``None`` (nothing to add, no decay, no momentum); the compiler then leaves its lines out.
"""

# mypy: ignore-errors

import numpy as np

from pscore.jit import compile_once

RUN = 32


@compile_once
def feed(r, g, theta, u, scale, decay, factor):
    """Accumulate, and no more."""
    for i in range(r.size):
        d = scale * g[i]
        if theta is not None:
            d += decay * theta[i]
        if u is not None:
            d += factor * u[i]
            u[i] = d
        r[i] += d


@compile_once
def take(r, g, theta, u, scale, decay, factor, threshold, keep, offsets, values):
    """Accumulate and take out what is above the threshold, in one pass.

    Returns how many are above, and the sum of their excess; those that do not fit into ``offsets`` are counted and
    stay.
    """
    count, capacity, excess = 0, offsets.size, 0.0
    runs = r.size // RUN
    for number in range(runs + 1):
        low = number * RUN
        high = low + RUN
        hit = np.int32(0)
        if number < runs:
            for j in range(RUN):  # a fixed number of turns: this is the loop that is vectorised
                i = low + j
                v = r[i]
                if g is not None:
                    d = scale * g[i]
                    if theta is not None:
                        d += decay * theta[i]
                    if u is not None:
                        d += factor * u[i]
                        u[i] = d
                    v += d
                    r[i] = v
                hit |= np.int32(abs(v) > threshold)
        else:
            high, hit = r.size, np.int32(1)
            if g is not None:
                feed(
                    r[low:],
                    g[low:],
                    None if theta is None else theta[low:],
                    None if u is None else u[low:],
                    scale,
                    decay,
                    factor,
                )
        if not hit:
            continue
        for i in range(low, high):
            v = r[i]
            if abs(v) > threshold:
                if count < capacity:
                    offsets[count] = i
                    values[count] = v
                    r[i] = keep * v
                count += 1
                excess += abs(v) - threshold
    return count, excess


@compile_once
def take_difference(a, b, threshold, offsets, values):
    """Copy out ``a − b`` where it is above the threshold; returns as :func:`take`."""
    count, capacity, excess = 0, offsets.size, 0.0
    runs = a.size // RUN
    for number in range(runs + 1):
        low = number * RUN
        high = low + RUN
        hit = np.int32(0)
        if number < runs:
            for j in range(RUN):
                hit |= np.int32(abs(a[low + j] - b[low + j]) > threshold)
        else:
            high, hit = a.size, np.int32(1)
        if not hit:
            continue
        for i in range(low, high):
            v = a[i] - b[i]
            if abs(v) > threshold:
                if count < capacity:
                    offsets[count] = i
                    values[count] = v
                count += 1
                excess += abs(v) - threshold
    return count, excess


@compile_once
def tail(x, threshold):
    """Count what is above the threshold, and sum its excess."""
    count, excess = 0, 0.0
    runs = x.size // RUN
    for number in range(runs + 1):
        low = number * RUN
        high = low + RUN
        hit = np.int32(0)
        if number < runs:
            for j in range(RUN):
                hit |= np.int32(abs(x[low + j]) > threshold)
        else:
            high, hit = x.size, np.int32(1)
        if not hit:
            continue
        for i in range(low, high):
            v = abs(x[i])
            if v > threshold:
                count += 1
                excess += v - threshold
    return count, excess


@compile_once
def magnitude(x):
    """Sum and largest of ``|x|``."""
    total, largest = 0.0, np.float32(0)
    for low in range(0, x.size, RUN):
        part = np.float32(0)
        for i in range(low, min(low + RUN, x.size)):
            v = abs(x[i])
            part += v
            largest = max(largest, v)
        total += part
    return total, largest


@compile_once
def subtract_at(x, offsets, values):
    """``x[offsets] −= values``, in order."""
    for i in range(offsets.size):
        x[offsets[i]] -= values[i]


@compile_once
def exceeding(a, b, offsets, ends, bounds, found):
    """Write those of ``offsets`` where ``|a − b|`` exceeds its tensor's bound; return how many."""
    count, tensor = 0, 0
    for i in range(offsets.size):
        j = offsets[i]
        while j >= ends[tensor]:
            tensor += 1
        if abs(a[j] - b[j]) > bounds[tensor]:
            found[count] = j
            count += 1
    return count

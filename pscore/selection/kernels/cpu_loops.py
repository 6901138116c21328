"""The compiled loops of :mod:`pscore.selection.kernels.cpu`.

An argument may be ``None``; the compiler then leaves its lines out.
"""

# mypy: ignore-errors

import numpy as np

from pscore.jit import compiled

RUN = 32


@compiled
def take(x, g, theta, u, scale, decay, factor, threshold, keep, offsets, values):
    """Accumulate into ``x`` and take out the entries above the threshold, in one pass.

    Elements are visited in runs whose
    comparisons are joined before one branch is taken: at the usual densities most runs have no entry, and the compiler
    makes vector instructions of the rest.

    Returns how many entries are above, and the sum of their excess. Entries that do not fit into ``offsets`` are
    counted and stay.
    """
    count, capacity, excess = 0, offsets.size, 0.0
    runs = x.size // RUN
    for number in range(runs + 1):
        low = number * RUN
        high = low + RUN
        hit = np.int32(0)
        if number < runs:
            for j in range(RUN):  # a fixed number of turns: this is the loop that is vectorised
                i = low + j
                v = x[i]
                if g is not None:
                    d = scale * g[i]
                    if theta is not None:
                        d += decay * theta[i]
                    if u is not None:
                        d += factor * u[i]
                        u[i] = d
                    v += d
                    x[i] = v
                hit |= np.int32(not abs(v) <= threshold)  # so that NaN is above, and is noticed
        else:
            high, hit = x.size, np.int32(1)
            if g is not None:
                for i in range(low, high):
                    d = scale * g[i]
                    if theta is not None:
                        d += decay * theta[i]
                    if u is not None:
                        d += factor * u[i]
                        u[i] = d
                    x[i] += d
        if not hit:
            continue
        for i in range(low, high):
            v = x[i]
            if not abs(v) <= threshold:
                if count < capacity:
                    offsets[count] = i
                    values[count] = v
                    x[i] = keep * v
                count += 1
                excess += abs(v) - threshold
    return count, excess


@compiled
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


@compiled
def subtract_at(x, offsets, values, large):
    """``x[offsets] −= values``; False, with nothing changed, if a value above ``large`` would make one infinite."""
    largest = np.int32(0)
    for bits in values.view(np.int32):  # those of magnitudes have their order, and are compared in vector instructions
        largest = max(largest, bits & np.int32(0x7FFFFFFF))
    if largest > np.float32(large).view(np.int32):
        for i in range(offsets.size):
            if not np.isfinite(x[offsets[i]] - values[i]):
                return False
    for i in range(offsets.size):
        x[offsets[i]] -= values[i]
    return True

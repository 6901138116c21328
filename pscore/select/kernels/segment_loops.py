"""The compiled loops of :mod:`pscore.select.kernels.segments`, which imports them when it needs them."""

# mypy: ignore-errors

import numpy as np
from numba.extending import register_jitable

from pscore.jit import compiled
from pscore.pointers import float32_at, uint16_at, uint32_at

BLOCK = 2048  # elements that are brought through all steps of a recurrence while they are in the first cache
RUN = 32
FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2


@register_jitable
def load(x, bits, address, kind, first, count):
    """Write ``count`` numbers of a tensor, from ``first`` on, to ``x`` as fp32; ``bits`` is the memory of ``x``."""
    if kind == FLOAT32:
        source = float32_at(address + 4 * first, count)
        for j in range(count):
            x[j] = source[j]
        return
    half = uint16_at(address + 2 * first, count)
    if kind == BFLOAT16:
        for j in range(count):
            bits[j] = np.uint32(half[j]) << np.uint32(16)
        return
    for j in range(count):
        magnitude = np.uint32(np.uint32(half[j] & np.uint16(0x7FFF)) << np.uint32(13))
        if magnitude >= np.uint32(0x0F800000):  # infinite, or no number
            magnitude |= np.uint32(0x7F800000)
        bits[j] = magnitude
    for j in range(count):
        x[j] *= np.float32(2.0**112)
    for j in range(count):
        bits[j] |= np.uint32(half[j] & np.uint16(0x8000)) << np.uint32(16)


@compiled
def first_not_finite(addresses, kinds, tensors, firsts, sizes):
    """Return the number of the first piece with an element that is not finite, or -1."""
    for piece in range(tensors.size):
        tensor = tensors[piece]
        kind = kinds[tensor]
        for low in range(firsts[piece], firsts[piece] + sizes[piece], BLOCK):
            count = min(BLOCK, firsts[piece] + sizes[piece] - low)
            if kind == FLOAT32:
                words = uint32_at(addresses[tensor] + 4 * low, count)
                top = np.uint32(0)
                for j in range(count):
                    top = max(top, np.uint32(words[j] & np.uint32(0x7FFFFFFF)))
                if top >= np.uint32(0x7F800000):
                    return piece
            else:
                halves = uint16_at(addresses[tensor] + 2 * low, count)
                greatest = np.uint16(0)
                for j in range(count):
                    greatest = max(greatest, np.uint16(halves[j] & np.uint16(0x7FFF)))
                if greatest >= (0x7C00 if kind == FLOAT16 else 0x7F80):
                    return piece
    return -1


@compiled
def update(rows, pieces, low, high, clip, memory, momentum, whole, base, offsets, values, counts, taken, excess):
    """Update the pieces ``[low, high)``; see :func:`pscore.select.kernels.segments.update`.

    Entries are written from the start of ``offsets`` and ``values``; for each piece ``counts`` becomes the number of
    entries above the threshold, ``taken`` of those that were written, ``excess`` the sum of what they exceed it by.
    """
    x, theta = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    bits, theta_bits = x.view(np.uint32), theta.view(np.uint32)
    found = np.empty(RUN, np.int64)
    total = 0
    for number in range(low, high):
        row = rows[pieces[number].row]
        room = pieces[number].room
        scale, decay, factor, rate, retain = row.scale, row.decay, row.factor, row.rate, row.retain
        threshold, keep = row.threshold, row.keep
        above, fitted, sum_above = 0, 0, 0.0
        end = pieces[number].first + pieces[number].size
        for first in range(pieces[number].first, end, BLOCK):
            count = min(BLOCK, end - first)
            load(x, bits, row.gradient, row.gradient_kind, first, count)
            if clip != 1:
                for j in range(count):
                    x[j] *= clip
            if scale != 1:
                for j in range(count):
                    x[j] *= scale
            if row.parameters != 0:
                load(theta, theta_bits, row.parameters, row.parameter_kind, first, count)
                for j in range(count):
                    x[j] += decay * theta[j]
            start = row.start + first
            if factor != 0:
                u = momentum[start : start + count]
                if row.nesterov:
                    for j in range(count):
                        u[j] = factor * u[j] + x[j]
                        x[j] += factor * u[j]
                else:
                    for j in range(count):
                        u[j] = factor * u[j] + x[j]
                        x[j] = u[j]
            if row.whole:
                sent = whole[start - base : start - base + count]
                if row.has_residual:
                    r = memory[start : start + count]
                    for j in range(count):
                        sent[j] = row.unit * (retain * r[j] + rate * x[j])
                else:
                    for j in range(count):
                        sent[j] = row.unit * (rate * x[j])
                continue
            r = memory[start : start + count]
            for j in range(count):
                r[j] = retain * r[j] + rate * x[j]
            for begin in range(0, count, RUN):
                if begin + RUN <= count:
                    hit = np.int32(0)
                    for j in range(RUN):  # a fixed number of turns: this is the loop that is vectorised
                        hit |= np.int32(abs(r[begin + j]) > threshold)
                    if not hit:
                        continue
                hits = 0
                for j in range(begin, min(begin + RUN, count)):
                    found[hits] = j
                    hits += abs(r[j]) > threshold
                above += hits
                for i in range(hits):
                    j = found[i]
                    v = r[j]
                    sum_above += abs(v) - threshold
                    if fitted < room:
                        offsets[total] = start + j - base
                        values[total] = v
                        r[j] = keep * v
                        total += 1
                        fitted += 1
        counts[number], taken[number], excess[number] = above, fitted, sum_above
    return total

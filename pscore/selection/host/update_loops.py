"""The compiled loops of :mod:`pscore.selection.host.segments`, which imports them when it needs them."""

# mypy: ignore-errors

import numpy as np
from numba import extending  # not numba.extending: while another thread imports numba, that would not wait for it

from pscore.jit import compiled
from pscore.pointers import float32_at, uint16_at, uint32_at

BLOCK = 2048  # elements that are brought through all steps of a recurrence while they are in the first cache
RUN = 64
FLOAT32, FLOAT16, BFLOAT16 = 0, 1, 2


@extending.register_jitable
def load(x, bits, address, kind, first, count, clip, scale):
    """Write ``scale·(clip·y)`` of ``count`` elements of a tensor to ``x``; ``bits`` is the memory of ``x``."""
    if kind == FLOAT32:
        source = float32_at(address + 4 * first, count)
        for j in range(count):
            x[j] = scale * (clip * source[j])
        return
    half = uint16_at(address + 2 * first, count)
    if kind == BFLOAT16:
        for j in range(count):
            bits[j] = np.uint32(half[j]) << np.uint32(16)
    else:
        for j in range(count):
            magnitude = np.uint32(np.uint32(half[j] & np.uint16(0x7FFF)) << np.uint32(13))
            if magnitude >= np.uint32(0x0F800000):  # infinite, or no number
                magnitude |= np.uint32(0x7F800000)
            bits[j] = magnitude
        for j in range(count):
            x[j] *= np.float32(2.0**112)
        for j in range(count):
            bits[j] |= np.uint32(half[j] & np.uint16(0x8000)) << np.uint32(16)
    for j in range(count):
        x[j] = scale * (clip * x[j])


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


@extending.register_jitable
def number_on(offsets, count, first):
    """Write ``count`` offsets from ``first`` on; return False: those behind are not the next ones."""
    for j in range(count):
        offsets[j] = first + j
    return False


@compiled
def update(rows, pieces, low, high, clip, memory, momentum, whole, offsets, values, counts, taken, excess):
    """Update the pieces ``[low, high)``; see :meth:`pscore.selection.host.segments.HostSegments.select`.

    Entries are written from the start of ``offsets`` and ``values``; for each piece ``counts`` becomes the number of
    entries above the threshold, ``taken`` of those that were written, ``excess`` the sum of what they exceed it by: of
    a row that is not searched only whether that is finite.

    Returns how many entries were written, and the offset of the first if each is the neighbour of the one before:
    such offsets are not written. Else -1.
    """
    x, theta = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    bits, theta_bits, memory_bits = x.view(np.uint32), theta.view(np.uint32), memory.view(np.uint32)
    found, one = np.empty(RUN, np.int64), np.float32(1)
    total, is_dense = 0, True
    origin = rows[pieces[low].row].start + pieces[low].first
    for number in range(low, high):
        row = rows[pieces[number].row]
        room = pieces[number].room
        scale, decay, factor, rate, retain = row.scale, row.decay, row.factor, row.rate, row.retain
        threshold, keep = row.threshold, row.keep
        above, fitted, sum_above = 0, 0, 0.0
        end = pieces[number].first + pieces[number].size
        for first in range(pieces[number].first, end, BLOCK):
            count = min(BLOCK, end - first)
            start = row.start + first
            r = memory[start : start + count]
            if row.gradient_kind == FLOAT32 and factor == 0 and row.parameters == 0 and not row.whole:
                g = float32_at(row.gradient + 4 * first, count)
                for j in range(count):
                    r[j] = retain * r[j] + rate * (scale * (clip * g[j]))
            else:
                load(x, bits, row.gradient, row.gradient_kind, first, count, clip, scale)
                if row.parameters != 0:
                    load(theta, theta_bits, row.parameters, row.parameter_kind, first, count, one, decay)
                    for j in range(count):
                        x[j] += theta[j]
                if factor != 0:
                    u = momentum[start : start + count]
                    for j in range(count):
                        u[j] = factor * u[j] + x[j]
                        x[j] = u[j]
                if row.whole:
                    sent = whole[start : start + count]
                    if row.has_residual:
                        for j in range(count):
                            sent[j] = row.unit * (retain * r[j] + rate * x[j])
                    else:
                        for j in range(count):
                            sent[j] = row.unit * (rate * x[j])
                    continue
                for j in range(count):
                    r[j] = retain * r[j] + rate * x[j]
            if threshold <= 0 and not row.searched:
                full, top = np.int32(0), np.uint32(0)
                words = memory_bits[start : start + count]
                for j in range(count):
                    full += np.int32(abs(r[j]) > threshold)
                for j in range(count):
                    top = max(top, np.uint32(words[j] & np.uint32(0x7FFFFFFF)))
                if full == count:
                    if is_dense and start != origin + total:
                        is_dense = number_on(offsets, total, origin)
                    if not is_dense:
                        for j in range(count):
                            offsets[total + j] = start + j
                    for j in range(count):
                        values[total + j] = r[j]
                    for j in range(count):
                        r[j] *= keep
                    if top >= np.uint32(0x7F800000):
                        sum_above = np.inf
                    above, fitted, total = above + count, fitted + count, total + count
                    continue
            for begin in range(0, count, RUN):
                run = r[begin : begin + RUN]
                if run.size == RUN:
                    hit = np.int32(0)
                    for j in range(RUN):  # a fixed number of turns, without a branch: of vector instructions
                        hit |= np.int32(not abs(run[j]) <= threshold)  # so that NaN is above, and is noticed
                    if not hit:
                        continue
                hits = 0
                for j in range(run.size):
                    found[hits] = j
                    hits += not abs(run[j]) <= threshold
                if is_dense and hits > 0:
                    is_dense = number_on(offsets, total, origin)
                above += hits
                place = start + begin
                for i in range(hits):
                    j = found[i]
                    v = run[j]
                    sum_above += abs(v) - threshold
                    if fitted < room:
                        offsets[total] = place + j
                        values[total] = v
                        run[j] = keep * v
                        total += 1
                        fitted += 1
        counts[number], taken[number], excess[number] = above, fitted, sum_above
    return total, origin if is_dense and total > 0 else -1

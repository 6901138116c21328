"""The compiled loops of replies: top-k of a difference, and what is added where."""

# mypy: ignore-errors

import math

import numpy as np

from pscore.jit import compiled
from psservice.model.union_loops import lowest

WORD = 64
"""Elements whose comparisons are the bits of one word."""

LINE = 16
"""Elements that are sampled together: a cache line."""

_TOLERANCE = 0.1  # share of k by which a selection may miss it
_FEW = 0.75  # share of k below which what has changed is not enough, and the whole tensor is looked at
_DIGIT = 11  # bits

_MAGNITUDE = np.int32(0x7FFFFFFF)
_ROUNDING = np.float32(2**-22)  # share of a difference that may be lost by it and by the sum that undoes it
_0, _1 = np.uint64(0), np.uint64(1)


@compiled
def merge(offsets, values, later_offsets, later_values, all_offsets, all_values):
    """Merge two ascending lists of entries; of equal offsets the later one's value counts. Return the number."""
    count, i, j = 0, 0, 0
    while i < offsets.size or j < later_offsets.size:
        if j == later_offsets.size or (i < offsets.size and offsets[i] < later_offsets[j]):
            all_offsets[count], all_values[count] = offsets[i], values[i]
            i += 1
        else:
            if i < offsets.size and offsets[i] == later_offsets[j]:
                i += 1
            all_offsets[count], all_values[count] = later_offsets[j], later_values[j]
            j += 1
        count += 1
    return count


@compiled
def add_at(x, offsets, values):
    """``x[offsets] += values``, in order."""
    for i in range(offsets.size):
        x[offsets[i]] += values[i]


@compiled
def largest(bits, rank, histogram):
    """Return the ``rank``-th largest magnitude of fp32 values, all as their bits, and its rank among equal ones."""
    prefix, shift = 0, 31
    for width in (_DIGIT, _DIGIT, 31 - 2 * _DIGIT):
        shift -= width
        histogram[:] = 0
        for i in range(bits.size):
            magnitude = bits[i] & _MAGNITUDE
            if magnitude >> (shift + width) == prefix:
                histogram[(magnitude >> shift) & ((1 << width) - 1)] += 1
        digit = (1 << width) - 1
        while histogram[digit] < rank:
            rank -= histogram[digit]
            digit -= 1
        prefix = prefix << width | digit
    return prefix, rank


@compiled
def cut(offsets, values, k, histogram):
    """Move the ``k`` entries of the largest magnitudes to the front, in order; return the least of these magnitudes."""
    bits = values.view(np.int32)
    least, equal = largest(bits, k, histogram)
    magnitude, kept = np.float32(0), 0
    for i in range(bits.size):
        if bits[i] & _MAGNITUDE == least:
            magnitude = abs(values[i])
            equal -= 1
        if bits[i] & _MAGNITUDE > least or (bits[i] & _MAGNITUDE == least and equal >= 0):
            offsets[kept], values[kept] = offsets[i], values[i]
            kept += 1
    return magnitude


@compiled
def sample(x, y, first, values):
    """Fill in ``values`` with differences from all parts of ``x − y``, which has as many elements or more.

    ``first`` is the offset of ``x[0]``.
    """
    if values.size == x.size:
        for i in range(x.size):
            values[i] = x[i] - y[i]
        return
    lines = values.size // LINE
    for line in range(lines):
        begin = line * (x.size - LINE) // lines
        begin -= min(begin, (first + begin) % LINE)
        for i in range(LINE):
            values[line * LINE + i] = x[begin + i] - y[begin + i]


@compiled
def take(x, y, threshold, first, offsets, values, count):
    """Append what exceeds the threshold of ``x − y``, whose offsets begin at ``first``."""
    for i in range(x.size):
        difference = x[i] - y[i]
        if abs(difference) > threshold:
            offsets[count], values[count] = first + i, difference
            count += 1
    return count


@compiled
def take_of_word(x, y, threshold, first, offsets, values, count):
    """Do the same with 64 elements."""
    word = _0
    for i in range(WORD):  # a fixed number of turns, without a branch: this loop is vectorised
        word |= np.uint64(abs(x[i] - y[i]) > threshold) << np.uint64(i)
    while word != _0:
        i = lowest(word)
        offsets[count], values[count] = first + i, x[i] - y[i]
        count += 1
        word &= word - _1
    return count


@compiled
def scan(x, y, threshold, k, most, first, offsets, values, histogram):
    """Copy what exceeds the threshold of ``x − y``, which rises if there are more than ``most`` entries.

    Return the number and the threshold. ``first`` is the offset of ``x[0]``.
    """
    head = min(-first % LINE, x.size)  # words that begin with a cache line are read faster
    count = take(x[:head], y[:head], threshold, first, offsets, values, 0)
    words = (x.size - head) // WORD
    for number in range(words):
        if count > most:
            threshold, count = cut(offsets[:count], values[:count], k, histogram), k
        begin = head + number * WORD
        part, other = x[begin : begin + WORD], y[begin : begin + WORD]
        count = take_of_word(part, other, threshold, first + begin, offsets, values, count)
    if count > most:
        threshold, count = cut(offsets[:count], values[:count], k, histogram), k
    begin = head + words * WORD
    return take(x[begin:], y[begin:], threshold, first + begin, offsets, values, count), threshold


@compiled
def select(a, b, among, is_among, starts, ends, ks, rooms, samples, bounds, offsets, values):
    """Copy about the ``ks[t]`` largest entries of ``a − b`` of each tensor ``t``; return how many.

    Tensor ``t`` is ``[starts[t], ends[t])``; tensors ascend. One with ``k`` of its size gives all that is not zero. The
    others give what exceeds a threshold, which a sample of ``samples[t]`` elements tells, and a surplus is cut down to
    ``k``: each element is read once. The threshold rises if the surplus fills ``rooms[t]`` entries. If too few
    exceed the threshold, that tensor is read again with a lower one.

    If ``is_among``, ``among`` (int64, ascending) has the offsets of all entries that may exceed the bound of their
    tensor. Those are looked at alone, and the whole tensor only if too few exceed it.

    ``a`` may change meanwhile: an entry's value is the one that was compared, and nothing is written without room.

    ``bounds`` (fp32) become the magnitudes above which nothing stays behind. ``offsets`` and ``values`` have room for
    ``1.1·k`` entries of each tensor, and behind them for the largest of ``rooms``. A room is the tensor's size, or at
    least ``k`` and two words more; a sample's size is the tensor's, or a multiple of 16.
    """
    place, candidate = 0, 0
    histogram, sampled = np.empty(1 << _DIGIT, np.int64), np.empty(samples.max(), np.float32)
    bits = np.empty(1, np.int32)
    for t in range(starts.size):
        first, k = starts[t], ks[t]
        x, y = a[first : ends[t]], b[first : ends[t]]
        most = rooms[t] - WORD if rooms[t] < x.size else x.size
        out, out_values = offsets[place : place + rooms[t]], values[place : place + rooms[t]]
        everything, found, taken, threshold = k >= x.size, False, 0, bounds[t]
        if is_among:
            while candidate < among.size and among[candidate] < ends[t]:
                i = among[candidate]
                difference = a[i] - b[i]
                if taken > most:
                    threshold, taken = cut(out[:taken], out_values[:taken], k, histogram), k
                if abs(difference) > threshold:
                    out[taken], out_values[taken] = i, difference
                    taken += 1
                candidate += 1
            found = everything or threshold == 0 or taken >= _FEW * k
        part = sampled[: samples[t]]
        if not found and not everything:
            sample(x, y, first, part)
        rank = float(k)
        if part.size < x.size:
            rank *= part.size / x.size
            rank += math.sqrt(rank) + 2
        while not found:
            threshold = np.float32(0)
            if not everything and rank <= part.size:
                bits[0], _ = largest(part.view(np.int32), int(rank), histogram)
                bits[0] = max(bits[0] - 1, 0)
                threshold = bits.view(np.float32)[0]
            taken, threshold = scan(x, y, threshold, k, most, first, out, out_values, histogram)
            found = everything or threshold == 0 or taken >= (1 - _TOLERANCE) * k
            rank *= 4
        if not everything and taken > (1 + _TOLERANCE) * k:
            threshold, taken = cut(out[:taken], out_values[:taken], k, histogram), k
        bounds[t] = threshold
        place += taken
    return place


@compiled
def left_of(x, y, offsets, values, arrived, ends, bounds, found):
    """Copy the offsets at which ``x − y`` still exceeds its tensor's bound; return how many.

    ``values`` were ``x − y``, and ``arrived`` has been added to ``y``; ``ends`` and ``bounds`` are as for
    :func:`select`. If ``x`` is the same still, ``2·|value − arrived| + 2⁻²²·|value|`` bounds what is left: numbers
    within a factor of 2 have an exact difference, and others one of at least half of the larger number. So ``x`` and
    ``y``, whose elements lie far apart, are seldom read.
    """
    t, count = 0, 0
    for i in range(offsets.size):
        offset, value = offsets[i], values[i]
        while offset >= ends[t]:
            t += 1
        if np.float32(2) * abs(value - arrived[i]) + _ROUNDING * abs(value) > bounds[t]:
            found[count] = offset
            count += abs(x[offset] - y[offset]) > bounds[t]
    return count


def warm_up() -> None:
    """Run every loop once, so that no pull waits for the compiler: some seconds, once a machine."""
    x, values = np.ones(64, np.float32), np.empty(128, np.float32)
    offsets, one = np.zeros(128, np.int64), np.ones(1, np.int64)
    merge(one, x[:1], one, x[:1], offsets, values)
    add_at(x, one, x[:1])
    select(x, x, one, False, 0 * one, 64 * one, one, 64 * one, 64 * one, x[:1], offsets, values)
    left_of(x, x, one, x[:1], x[:1], 64 * one, x[:1], offsets)

"""The compiled loops of replies: unions by bitmap, top-k of a difference, and what is added where."""

# mypy: ignore-errors

import math

import numpy as np

from pscore.jit import compiled

ROOM = 4
"""A tensor's room while it is selected from, as a multiple of its ``k``: a surplus up to there needs no other pass."""

_RUN = 8  # elements whose comparisons are joined before one branch is taken: a vector
_FEW = 0.75  # share of k below which what has changed is not enough, and the whole tensor is looked at
_TOLERANCE = 0.1  # share of k by which a selection may miss it
_AIM = 1.6  # of k, where a threshold is raised within a reply: a surplus is cheaper than another pass
_FALL = 0.85  # where it is lowered, and what it may fall by from reply to reply
_HIGHEST = 0.98  # of the threshold that had been best, for the next reply
_RISE = 1.05  # of the lowest best one, from reply to reply: their number of pushes may vary
_MOST_PASSES = 8
_RANKED_REPLIES = 16
_DIGIT = 11  # bits

_DE_BRUIJN = 0x03F79D71B4CB0A89
_PLACES = np.empty(64, np.int64)
"""The number of the only 1 bit of a word, by the top 6 bits of the word times the de Bruijn sequence."""
_PLACES[[(_DE_BRUIJN << place & 0xFFFFFFFFFFFFFFFF) >> 58 for place in range(64)]] = range(64)


@compiled
def mark(words, offsets):
    """Set the bits of ``offsets`` in ``words`` (uint64, 64 elements each)."""
    for i in range(offsets.size):
        offset = offsets[i]
        words[offset >> 6] |= np.uint64(1) << np.uint64(offset & 63)


@compiled
def gather(words, x, offsets, values):
    """Write the offsets of the bits that are set, ascending, and ``x`` there; without ``x`` offsets only.

    As many as there is room for in ``offsets``.
    """
    count = 0
    for number in range(words.size):
        word = words[number]
        while word and count < offsets.size:
            lowest = word & (~word + np.uint64(1))
            offset = (number << 6) + _PLACES[(lowest * np.uint64(_DE_BRUIJN)) >> np.uint64(58)]
            offsets[count] = offset
            if x is not None:
                values[count] = x[offset]
            count += 1
            word ^= lowest


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
def select(a, b, among, is_among, starts, ends, ks, thresholds, bests, floors, ranked, bounds, offsets, values):
    """Copy about the ``ks[t]`` largest entries of ``a − b`` of each tensor ``t``; return how many.

    Tensor ``t`` is ``[starts[t], ends[t])``; tensors ascend. One with ``k`` of its size gives all that is not zero. The
    others give what exceeds their threshold, and a surplus is cut down to ``k``: each element is read once. Where too
    few exceed the threshold, or more than ``ROOM·k``, the threshold is corrected and that tensor read again. Where the
    passes do not suffice (equal magnitudes on both sides of ``k``), all are copied and cut, in this reply and the next
    ones, which ``ranked`` counts down.

    Where ``is_among``, ``among`` (int64, ascending) has the offsets of all entries that may exceed the bound of their
    tensor. Those are looked at alone, and the whole tensor only where too few exceed it.

    ``a`` may change meanwhile: an entry's value is the one that was compared, and nothing is written without room.

    ``thresholds``, ``bests`` and ``floors`` (fp32, 0 at first) become those of the next reply, ``bounds`` the
    magnitudes above which nothing stays behind. ``offsets`` and ``values`` have room for ``1.1·k`` entries of each
    tensor, and behind them for the largest tensor.
    """
    place, candidate, histogram = 0, 0, np.empty(1 << _DIGIT, np.int64)
    for t in range(starts.size):
        first, k = starts[t], ks[t]
        x, y = a[first : ends[t]], b[first : ends[t]]
        everything = k >= x.size
        out, out_values = offsets[place : place + x.size], values[place : place + x.size]
        threshold, low, high = np.float32(0) if everything else thresholds[t], np.float32(0), np.float32(np.inf)
        passes, count, taken, excess, found = _MOST_PASSES if ranked[t] else 0, 0, 0, 0.0, False
        if is_among:
            bound = bounds[t]
            while candidate < among.size and among[candidate] < ends[t]:
                i = among[candidate]
                v = a[i] - b[i]
                if abs(v) > bound:
                    out[taken], out_values[taken] = i, v
                    taken += 1
                    excess += abs(v) - bound
                candidate += 1
            count, found = taken, everything or bound == 0 or taken >= _FEW * k
            threshold = bound if found else threshold
        while not found:
            room = min(x.size, ROOM * k)
            if passes == _MOST_PASSES:
                threshold, room = np.float32(0), x.size
            passes += 1
            count, taken, excess = 0, 0, 0.0
            runs = x.size // _RUN
            for number in range(runs + 1):
                begin = number * _RUN
                end, hit = begin + _RUN, np.int32(0)
                if number < runs:
                    for i in range(_RUN):  # a fixed number of turns: this is the loop that is vectorised
                        hit |= np.int32(abs(x[begin + i] - y[begin + i]) > threshold)
                else:
                    end, hit = x.size, np.int32(1)
                if not hit:
                    continue
                for i in range(begin, end):
                    v = x[i] - y[i]
                    magnitude = abs(v)
                    if magnitude > threshold:
                        if taken < room:
                            out[taken], out_values[taken] = first + i, v
                            taken += 1
                        count += 1
                        excess += magnitude - threshold
            few = count < (1 - _TOLERANCE) * k and threshold > 0
            if everything or passes > _MOST_PASSES or not (few or count > room):
                break
            # What stayed behind last time lies densely below the threshold: a little lower, there are many more.
            if few:
                high, following = threshold, threshold * np.float32(_FALL ** (passes * passes))
            else:
                low, following = threshold, np.float32(threshold + excess / count * math.log(count / (_AIM * k)))
            if not low < following < high:
                following = (low + high) / np.float32(2)
            if not low < following < high:
                passes = _MOST_PASSES
            threshold = following
        best = threshold
        if not everything and taken > (1 + _TOLERANCE) * k:
            bits, rank, prefix, shift = out_values[:taken].view(np.int32), k, 0, 31
            for width in (_DIGIT, _DIGIT, 31 - 2 * _DIGIT):  # the k-th largest magnitude, digit by digit
                shift -= width
                histogram[:] = 0
                for i in range(taken):
                    magnitude_bits = bits[i] & 0x7FFFFFFF
                    if magnitude_bits >> (shift + width) == prefix:
                        histogram[(magnitude_bits >> shift) & ((1 << width) - 1)] += 1
                digit = (1 << width) - 1
                while histogram[digit] < rank:
                    rank -= histogram[digit]
                    digit -= 1
                prefix = prefix << width | digit
            kept = 0
            for i in range(taken):
                magnitude_bits = bits[i] & 0x7FFFFFFF
                if magnitude_bits == prefix:
                    best = abs(out_values[i])
                    rank -= 1
                if magnitude_bits > prefix or (magnitude_bits == prefix and rank >= 0):
                    out[kept], out_values[kept] = out[i], out_values[i]
                    kept += 1
            taken, bounds[t] = kept, best
        else:
            bounds[t] = threshold
            if count > 0:
                best = max(threshold / np.float32(2), np.float32(threshold + excess / count * math.log(count / k)))
        place += taken
        if passes > _MOST_PASSES:
            ranked[t] = ranked[t] - 1 if ranked[t] else _RANKED_REPLIES
        fall = min(np.float32(_HIGHEST), max(np.float32(_FALL), best / bests[t] if bests[t] > 0 else np.float32(1)))
        floors[t] = min(best, floors[t] * np.float32(_RISE)) if floors[t] > 0 else best
        thresholds[t], bests[t] = fall * floors[t], best
    return place


def warm_up() -> None:
    """Run every loop once, so that no pull waits for the compiler: some seconds, once a machine."""
    words, x, values = np.ones(1, np.uint64), np.ones(64, np.float32), np.empty(128, np.float32)
    offsets, state, one = np.zeros(128, np.int64), np.zeros((4, 1), np.float32), np.ones(1, np.int64)
    for dtype in (np.int32, np.int64):
        mark(words, np.zeros(1, dtype))
    gather(words, None, offsets[:1], None)
    gather(words, x, offsets[:1], values)
    merge(one, x[:1], one, x[:1], offsets, values)
    add_at(x, one, x[:1])
    select(x, x, one, False, 0 * one, 64 * one, one, *state[:3], 0 * one, state[3], offsets, values)

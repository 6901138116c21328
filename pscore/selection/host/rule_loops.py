"""The compiled loops of :mod:`pscore.selection.rule`, for all tensors of a table."""

# mypy: ignore-errors

import math

import numpy as np
from numba import extending  # not numba.extending: while another thread imports numba, that would not wait for it

from pscore.jit import compiled

RUN = 64
MEAN_RUN = 32  # elements whose magnitudes are summed in fp32
LARGEST = float(np.finfo(np.float32).max)

ROOM, SMALL_SIZE, RANKED_STEPS = 3, 1 << 14, 16  # as in the rule: the cache watches this file only, and a test the rule
MOST_PASSES, UNTIL_ZERO = 8, 3
LEVEL_GAIN, DRIFT_GAIN = 0.6, 0.3
RISING = 0.9  # of a drift that is kept if it goes up
MOST_HALVINGS = 20


@extending.register_jitable
def single(x):
    """Return a threshold in fp32, as the loops compare."""
    return float(np.float32(min(x, LARGEST)))


@extending.register_jitable
def pass_over(x, threshold, keep, shift, room, offsets, values):
    """Count what is above, and sum the excess; take the first ``room`` entries into ``offsets`` and ``values``."""
    least = np.float32(threshold)
    above, excess = 0, 0.0
    for low in range(0, x.size, RUN):
        run = x[low : low + RUN]
        if run.size == RUN:
            hit = np.int32(0)
            for j in range(RUN):
                hit |= np.int32(abs(run[j]) > least)
            if not hit:
                continue
        for j in range(run.size):
            v = run[j]
            if abs(v) > least:
                if above < room:
                    offsets[above], values[above] = shift + low + j, v
                    run[j] = keep * v
                above += 1
                excess += abs(v) - least
    return above, excess


@extending.register_jitable
def magnitude(x):
    """Return sum and largest of ``|x|``."""
    total, largest = 0.0, np.float32(0)
    for low in range(0, x.size, MEAN_RUN):
        part = np.float32(0)
        for i in range(low, min(low + MEAN_RUN, x.size)):
            v = abs(x[i])
            part += v
            largest = max(largest, v)
        total += part
    return total, float(largest)


@extending.register_jitable
def laplace_threshold(x, k):
    """Return ``b·ln(n/k)``, at most the largest magnitude: the threshold of Laplace magnitudes with their mean ``b``.

    0 only if every number is 0. Returns the largest magnitude, too.
    """
    total, largest = magnitude(x)
    return min(largest, total / x.size * math.log(x.size / k)), largest


@extending.register_jitable
def search(x, k, threshold, count, excess, offsets, values, off):
    """Return a threshold above which ``k`` entries lie, give or take ``off``, by the secant of the count's logarithm.

    ``count`` entries lie above ``threshold``, and exceed it by ``excess`` in sum. Counts fall exponentially in the
    tail. Its scale is ``β = s/c`` at first, then ``β = (t − t′)/ln(c′/c)`` between two passes, and the next threshold
    ``t + β·ln(c/k)``. If that leaves the known bracket, the bracket is halved, geometrically: magnitudes may span sixty
    orders. The threshold is 0 if no more than ``k`` entries are not zero, and -1 if the passes did not suffice.
    """
    low, high, plunge, tried, one = 0.0, np.inf, 1, 0, np.float32(1)
    scale = excess / count if count > 0 else 0.0
    if count > k:
        _, top = magnitude(x)
        low, high = max(low, threshold), top
    elif count < k:
        high = threshold
    while abs(count - k) > off:
        tried += 1
        following = -1.0
        if count > 0 and scale > 0:
            following = single(threshold + scale * math.log(count / k))
        if not low < following < high:
            if math.isinf(high):
                following = single(2 * threshold)
            elif low > 0:
                following = single(math.sqrt(low) * math.sqrt(high))
            else:
                plunge *= 2  # nothing is known below: fall faster and faster
                following = single(high * 2.0 ** (-plunge / 2))
        if tried == UNTIL_ZERO and low == 0:
            following = 0.0  # still too few: perhaps there are no more that are not zero
        elif tried > MOST_PASSES or not low < following < high:
            return -1.0
        before, count_before, threshold = threshold, count, following
        count, excess = pass_over(x, threshold, one, 0, 0, offsets, values)
        if count_before > 0 and count > 0 and count != count_before and threshold != before:
            scale = (threshold - before) / math.log(count_before / count)
        elif count > 0:
            scale = excess / count
        if count > k:
            low = max(low, threshold)
        elif count < k:
            high = min(high, threshold)
        if threshold == 0 and count <= k:
            return 0.0
    return threshold


@extending.register_jitable
def next_threshold(used, expected, drift, count, excess, k):
    """Return threshold and drift of the next step: level and drift of the best threshold (Holt's linear method).

    ``count`` entries lay above the ``used`` one; ``expected`` is the last prediction, infinite if there was none. The
    best threshold of this step was ``t + β·ln(c/k)`` with ``β`` = mean excess. The drift matters for a while after the
    learning rate has dropped: each step then takes from a residual that grows more slowly than it is emptied. Upwards
    it is damped: while a residual fills, its threshold rises with the root of the steps, ever more slowly, and would be
    overshot.
    """
    if used == 0 and count <= k:
        return 0.0, 0.0
    count = max(count, 1)
    excess = excess if math.isfinite(excess) else 0.0  # a sum may leave fp32 though its terms do not
    best = max(used / 2, used + excess / count * math.log(count / k))
    if math.isinf(expected):
        expected = best
    drift *= RISING if drift > 0 else 1.0
    level = expected + LEVEL_GAIN * (best - expected)
    drift += DRIFT_GAIN * (level - expected)
    return max(best / 2, level + drift), drift


@compiled
def predict(used, thresholds, drifts, counts, excess, wanted):
    """Set the next thresholds and drifts of many tensors."""
    for row in range(used.size):
        thresholds[row], drifts[row] = next_threshold(
            used[row], thresholds[row], drifts[row], counts[row], excess[row], wanted[row]
        )


@compiled
def ldte(x, k, tolerance):
    """Return the threshold of :func:`pscore.selection.exact.ldte`."""
    threshold, high = laplace_threshold(x, k)
    low = 0.0
    for _ in range(MOST_HALVINGS):
        if high == 0:
            return 0.0
        least, count = np.float32(threshold), 0
        for j in range(x.size):
            count += abs(x[j]) > least
        if abs(count - k) <= tolerance * k:
            return threshold
        if count > k:
            low = threshold
        else:
            high = threshold
        threshold = (low + high) / 2
    return low  # equal magnitudes on both sides of k: take from the side that has enough


@extending.register_jitable
def keep_largest(x, shift, k, count, offsets, values):
    """Put all but the ``k`` largest of the entries back; of equal ones the first stay taken. Return how many stay."""
    magnitudes = np.abs(values[:count])
    least = np.partition(magnitudes, count - k)[count - k]
    ties, kept = k, 0
    for i in range(count):
        ties -= magnitudes[i] > least
    for i in range(count):
        stays = magnitudes[i] > least
        if magnitudes[i] == least and ties > 0:
            stays, ties = True, ties - 1
        if stays:
            offsets[kept], values[kept] = offsets[i], values[i]
            kept += 1
        else:
            x[offsets[i] - shift] = values[i]
    return kept


@extending.register_jitable
def rank(x, k, keep, shift, offsets, values):
    """Take the ``k`` largest into ``offsets`` and ``values``, of equal ones the first, and no zero.

    Returns how many were taken, and a threshold just below the smallest; infinite if nothing was.
    """
    magnitudes = np.abs(x)
    least = np.partition(magnitudes, x.size - k)[x.size - k]
    ties, taken = k, 0
    for j in range(x.size):
        ties -= magnitudes[j] > least
    for j in range(x.size):
        v = x[j]
        is_tie = magnitudes[j] == least and ties > 0
        ties -= is_tie
        if (is_tie or magnitudes[j] > least) and v != 0:
            offsets[taken], values[taken] = shift + j, v
            x[j] = keep * v
            taken += 1
    if taken == 0:
        return 0, np.inf
    smallest = abs(values[0])
    for i in range(1, taken):
        smallest = min(smallest, abs(values[i]))
    return taken, float(np.nextafter(smallest, np.float32(0)))


@compiled
def correct(
    rows, searched, sizes, wanted, allowed, memory, thresholds, drifts, ranked, above, excess, taken, offsets,
    values, new_offsets, new_values, moves,
):  # fmt: skip
    """See :meth:`pscore.selection.host.segments.HostSegments._correct`; ``ranked``: the steps that are still ranked.

    With ``moves`` all entries are written anew; else every row is known to be within the tolerance. Returns the number
    of entries.
    """
    total, first, one = 0, 0, np.float32(1)
    for row in range(sizes.size):
        count, k, threshold = taken[row], wanted[row], thresholds[row]
        low, first = first, first + count
        if not moves:
            new, into = offsets[low:first], values[low:first]
        else:
            new, into = new_offsets[total:], new_values[total:]
        shift = rows[row].start
        x = memory[shift : shift + sizes[row]]
        off, is_cold = allowed[row], math.isinf(threshold)
        lacks = above[row] < k - off and threshold != 0  # at 0 there is no more to be had
        if searched[row] and (is_cold or lacks or above[row] > ROOM * k):
            for i in range(low, first):
                x[offsets[i] - shift] = values[i]
            is_small, found = sizes[row] <= SMALL_SIZE, -1.0
            if ranked[row] == 0 and not (is_cold and is_small):
                if is_cold:
                    threshold, _ = laplace_threshold(x, k)
                    if threshold == 0:  # of zeros nothing goes, and the next step is as cold
                        taken[row] = 0
                        continue
                    above[row], excess[row] = pass_over(x, threshold, one, 0, 0, new, into)
                found = search(x, k, threshold, above[row], excess[row], new, into, off)
            if found < 0:
                taken[row], least = rank(x, k, rows[row].keep, shift, new, into)
                steps = ranked[row] - 1 if ranked[row] > 0 else 0 if is_small else RANKED_STEPS
                ranked[row], thresholds[row], drifts[row] = steps, np.inf if steps > 0 else least, 0.0
                total += taken[row]
                continue
            threshold = found
            fits = min(ROOM * k, new.size)
            above[row], excess[row] = pass_over(x, threshold, rows[row].keep, shift, fits, new, into)
            count = min(above[row], fits)
        elif moves:
            for i in range(count):
                new[i], into[i] = offsets[low + i], values[low + i]
        if searched[row]:
            thresholds[row], drifts[row] = next_threshold(
                threshold, thresholds[row], drifts[row], above[row], excess[row], k
            )
            if above[row] > k + off and count > k:
                count = keep_largest(x, shift, k, count, new, into)
        taken[row] = count
        total += count
    return total

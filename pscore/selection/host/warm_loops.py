"""The compiled loop of :mod:`pscore.selection.warm` for all tensors of a table; the formulas are explained there."""

# mypy: ignore-errors

import math

import numpy as np
from numba.extending import register_jitable

from pscore.jit import compiled

RUN = 64
LARGEST = float(np.finfo(np.float32).max)


@register_jitable
def single(x):
    """Return a threshold in fp32, as the loops compare."""
    return float(np.float32(min(x, LARGEST)))


@register_jitable
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


@register_jitable
def search(x, k, threshold, count, excess, offsets, values, off, most_passes, until_zero):
    """Return a threshold above which ``k`` entries lie, give or take ``off``, after a pass at another one; or -1."""
    low, high, plunge, tried, one = 0.0, np.inf, 1, 0, np.float32(1)
    scale = excess / count if count > 0 else 0.0
    if count > k:
        top = np.float32(0)
        for j in range(x.size):
            top = max(top, abs(x[j]))
        low, high = max(low, threshold), float(top)
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
                plunge *= 2
                following = single(high * 2.0 ** (-plunge / 2))
        if tried == until_zero and low == 0:
            following = 0.0
        elif tried > most_passes or not low < following < high:
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


@register_jitable
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


@register_jitable
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
    rows, searched, sizes, wanted, allowed, base, memory, thresholds, drifts, above, excess, taken, offsets, values,
    new_offsets, new_values, moves, rule,
):  # fmt: skip
    """See :func:`pscore.selection.warm.correct`, which also says which rows are left; their ``taken`` is -1.

    With ``moves`` all entries are written anew; else every row is known to be within the tolerance. Returns the number
    of entries.
    """
    room, small_size, largest_size, most_passes, until_zero, level_gain, drift_gain, rising = rule
    total = first = 0
    for row in range(sizes.size):
        count, k, threshold = taken[row], wanted[row], thresholds[row]
        low, first = first, first + count
        if not moves:
            new, into = offsets[low:first], values[low:first]
        else:
            new, into = new_offsets[total:], new_values[total:]
        start = rows[row].start
        x, shift = memory[start : start + sizes[row]], start - base
        is_small, off = sizes[row] <= small_size, allowed[row]
        if searched[row] and math.isinf(threshold) and not is_small:
            taken[row] = -1
            continue
        lacks = above[row] < k - off and threshold != 0
        if searched[row] and (lacks or above[row] > room * k):
            for i in range(low, first):
                x[offsets[i] - shift] = values[i]
            found = -1.0
            if sizes[row] <= largest_size and not math.isinf(threshold):
                found = search(x, k, threshold, above[row], excess[row], new, into, off, most_passes, until_zero)
            if found < 0 and is_small:
                taken[row], thresholds[row] = rank(x, k, rows[row].keep, shift, new, into)
                drifts[row] = 0.0
                total += taken[row]
                continue
            if found < 0:
                taken[row] = -1
                continue
            threshold = found
            fits = min(room * k, new.size)
            above[row], excess[row] = pass_over(x, threshold, rows[row].keep, shift, fits, new, into)
            count = min(above[row], fits)
        elif moves:
            for i in range(count):
                new[i], into[i] = offsets[low + i], values[low + i]
        if searched[row]:
            if threshold == 0 and above[row] <= k:
                thresholds[row], drifts[row] = 0.0, 0.0
            else:
                best = max(threshold / 2, threshold + excess[row] / above[row] * math.log(above[row] / k))
                drift = drifts[row] * (rising if drifts[row] > 0 else 1.0)
                level = thresholds[row] + level_gain * (best - thresholds[row])
                drifts[row] = drift + drift_gain * (level - thresholds[row])
                thresholds[row] = max(best / 2, level + drifts[row])
            if above[row] > k + off and count > k:
                count = keep_largest(x, shift, k, count, new, into)
        taken[row] = count
        total += count
    return total

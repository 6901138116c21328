"""The steps of the Rice format in numpy: the reference for the compiled loops."""

import numpy as np
from numpy.typing import NDArray

from pscore.wire.codecs.format import Offsets
from pscore.wire.codecs.rice_loops import BLOCK, ESCAPE, MAX_PARAMETER, Gaps, Octets, Words


def _bits_of(words: Words) -> Octets:
    return np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")


def _words_of(bits: Octets) -> Words:
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def _widths(parameters: Octets, escaped: NDArray[np.bool_]) -> Offsets:
    """Low bits of each entry."""
    widths = parameters.astype(np.int64).repeat(BLOCK)[: escaped.size]
    widths[escaped] = 0
    return widths


def plan(offsets: Offsets, gaps: Gaps, parameters: Octets) -> tuple[int, int, int]:
    gaps[:] = np.diff(offsets, prepend=-1) - 1
    if not gaps.size:
        return 0, 0, 0
    starts = np.arange(0, gaps.size, BLOCK)
    entries = np.diff(starts, append=gaps.size)
    best = np.full(starts.size, np.iinfo(np.int64).max)
    unary, escapes = np.zeros_like(best), np.zeros_like(best)
    for parameter in range(MAX_PARAMETER + 1):
        if (entries * (1 + parameter) >= best).all():  # an entry never costs less
            break
        quotients = gaps >> np.uint32(parameter)
        escaped = np.add.reduceat(quotients >= ESCAPE, starts, dtype=np.int64)
        ones = np.add.reduceat(np.minimum(quotients, ESCAPE), starts, dtype=np.int64) + entries
        cost = ones + (entries - escaped) * parameter + 32 * escaped
        better = cost < best
        best[better], unary[better], escapes[better] = cost[better], ones[better], escaped[better]
        parameters[better] = parameter
    low = (entries - escapes) * parameters.astype(np.int64)
    return int(unary.sum()), int(low.sum()), int(escapes.sum())


def write(gaps: Gaps, parameters: Octets, quotients: Words, low: Words, escapes: Gaps) -> None:
    shifts = parameters.astype(np.uint32).repeat(BLOCK)[: gaps.size]
    runs = np.minimum(gaps >> shifts, ESCAPE).astype(np.int64)
    escaped = runs == ESCAPE
    escapes[:] = gaps[escaped]
    bits = np.zeros(32 * quotients.size, np.uint8)
    bits[np.cumsum(runs + 1) - 1] = 1
    quotients[:] = _words_of(bits)
    widths = _widths(parameters, escaped)
    ends = np.cumsum(widths)
    total = int(ends[-1]) if ends.size else 0
    place = np.arange(total) - (ends - widths).repeat(widths)
    bits = np.zeros(32 * low.size, np.uint8)
    bits[:total] = gaps.astype(np.int64).repeat(widths) >> place & 1
    low[:] = _words_of(bits)


def read_quotients(quotients: Words, parameters: Octets, runs: Offsets) -> tuple[int, int]:
    ones = np.flatnonzero(_bits_of(quotients).view(np.bool_))
    runs[:] = np.diff(ones, prepend=-1) - 1
    if runs.size and int(runs.max()) > ESCAPE:
        return -1, -1
    escaped = runs == ESCAPE
    return int(_widths(parameters, escaped).sum()), int(np.count_nonzero(escaped))


def join(runs: Offsets, parameters: Octets, low: Words, escapes: Gaps) -> bool:
    escaped = runs == ESCAPE
    widths = _widths(parameters, escaped)
    starts = np.cumsum(widths) - widths
    padded = np.concatenate([low, np.zeros(2, np.uint32)]).astype(np.uint64)
    first, bit = starts >> 5, (starts & 31).astype(np.uint64)
    window = (padded[first] | padded[first + 1] << np.uint64(32)) >> bit
    runs <<= widths
    runs |= window.astype(np.int64) & ((1 << widths) - 1)
    runs[escaped] = escapes
    shifts = parameters.astype(np.uint32).repeat(BLOCK)[: runs.size]
    if bool(((escapes >> shifts[escaped]) < ESCAPE).any()):
        return False
    runs[1:] += 1
    np.cumsum(runs, out=runs)
    return True

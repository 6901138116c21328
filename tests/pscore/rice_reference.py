"""The Rice format in numpy: the reference for the compiled loops, with the same arguments and answers."""

import numpy as np
from numpy.typing import NDArray

from pscore.wire.codecs.format import Offsets
from pscore.wire.codecs.index_loops import (
    BAD_COUNT,
    BAD_ESCAPE,
    BAD_PADDING,
    BAD_PARAMETER,
    BAD_QUOTIENT,
    BAD_SIZE,
    BLOCK,
    ESCAPE,
    MAX_PARAMETER,
)

Octets = NDArray[np.uint8]


def write_rice(offsets: Offsets, base: int) -> Octets:
    gaps = np.diff(offsets, prepend=base - 1) - 1
    parameters = _cheapest(gaps)
    widths = parameters.astype(np.int64).repeat(BLOCK)[: gaps.size]
    runs = np.minimum(gaps >> widths, ESCAPE)
    escaped = runs == ESCAPE
    quotients = np.zeros(int((runs + 1).sum()), np.uint8)
    quotients[np.cumsum(runs + 1) - 1] = 1
    widths[escaped] = 0
    place = np.arange(widths.sum()) - (np.cumsum(widths) - widths).repeat(widths)
    low = (gaps.repeat(widths) >> place & 1).astype(np.uint8)
    unary = np.packbits(quotients, bitorder="little")
    size = np.array([unary.size], "<u4").view(np.uint8)
    return np.concatenate(
        [size, parameters, unary, np.packbits(low, bitorder="little"), gaps[escaped].astype("<u4").view(np.uint8)]
    )


def _cheapest(gaps: Offsets) -> Octets:
    parameters = np.zeros(-(-gaps.size // BLOCK), np.uint8)
    for block in range(parameters.size):
        part = gaps[block * BLOCK : (block + 1) * BLOCK]
        costs = []
        for parameter in range(MAX_PARAMETER + 1):
            quotients = part >> parameter
            costs.append(np.where(quotients < ESCAPE, quotients + 1 + parameter, ESCAPE + 1 + 32).sum())
        parameters[block] = np.argmin(costs)
    return parameters


def read_rice(data: Octets, unary_size: int, count: int, base: int, offsets: Offsets) -> tuple[int, int, int]:
    start = 4 + -(-count // BLOCK)
    parameters, unary, rest = data[4:start], data[start : start + unary_size], data[start + unary_size :]
    if parameters.size and int(parameters.max()) > MAX_PARAMETER:
        return BAD_PARAMETER, 0, 0
    ones = np.flatnonzero(np.unpackbits(unary, bitorder="little"))
    if ones.size != count or (unary.size and not unary[-1]):
        return BAD_COUNT, ones.size, 0
    runs = np.diff(ones, prepend=-1) - 1
    if runs.size and int(runs.max()) > ESCAPE:
        return BAD_QUOTIENT, 0, 0
    escaped = runs == ESCAPE
    shifts = parameters.astype(np.int64).repeat(BLOCK)[:count]
    widths = np.where(escaped, 0, shifts)
    low_bits, low_size = int(widths.sum()), -(-int(widths.sum()) // 8)
    if rest.size != low_size + 4 * np.count_nonzero(escaped):
        return BAD_SIZE, low_bits, int(np.count_nonzero(escaped))
    bits = np.unpackbits(rest[:low_size], bitorder="little")
    if bits[low_bits:].any():
        return BAD_PADDING, 0, 0
    escapes = np.frombuffer(rest[low_size:].tobytes(), "<u4").astype(np.int64)
    if bool((escapes >> shifts[escaped] < ESCAPE).any()):
        return BAD_ESCAPE, 0, 0
    place = np.arange(low_bits) - (np.cumsum(widths) - widths).repeat(widths)
    low = np.bincount(np.arange(count).repeat(widths), bits[:low_bits].astype(np.int64) << place, count)
    gaps = (runs << widths) + low.astype(np.int64)
    gaps[escaped] = escapes
    offsets[:] = np.cumsum(gaps + 1) - 1 + base
    return 0, 0, 0

"""The steps between the sections of the Rice format, as compiled loops.

Arithmetic is in signed 64-bit integers throughout: mixed with unsigned ones numba makes floats of them.
"""

import numpy as np
from numpy.typing import NDArray

from pscore.jit import compiled
from pscore.wire.codecs.format import Offsets

Octets = NDArray[np.uint8]

Gaps = NDArray[np.uint32]
"""uint32 ``[count]``: an offset minus the previous one minus one; the first counts from -1."""

Words = NDArray[np.uint32]
"""A section of bits: bit ``i`` is bit ``i % 32`` of word ``i // 32``."""

# The constants of the format stand here because numba's cache watches the file of a function and no other.
BLOCK = 512
"""Entries that share a parameter."""

ESCAPE = 16
"""Quotient from which a gap is written in full."""

MAX_PARAMETER = 27
"""The largest for which every gap that needs no escape has 31 bits."""

_DE_BRUIJN = 0x077CB531
_PLACES = np.empty(32, np.int64)
"""The number of the only 1 bit of a word, by the top 5 bits of the word times the de Bruijn sequence."""
_PLACES[[(_DE_BRUIJN << place & 0xFFFFFFFF) >> 27 for place in range(32)]] = range(32)


@compiled
def plan(offsets: Offsets, gaps: Gaps, parameters: Octets) -> tuple[int, int, int]:
    """Fill in the gaps and each block's cheapest parameter (the lowest of equals).

    Returns bits of the quotients, bits of the low parts, and escapes.
    """
    previous = np.int64(-1)
    for i in range(offsets.size):
        gaps[i] = offsets[i] - previous - 1
        previous = offsets[i]
    unary = low = escapes = np.int64(0)
    for block in range(parameters.size):
        part = gaps[block * BLOCK : (block + 1) * BLOCK]
        best = best_unary = best_escapes = best_parameter = np.int64(-1)
        for parameter in range(MAX_PARAMETER + 1):
            if best >= 0 and part.size * (1 + parameter) >= best:  # an entry never costs less
                break
            limit = np.uint32(ESCAPE << parameter)
            quotients = escaped = np.uint32(0)  # narrow, for wide vectors
            for i in range(part.size):
                if part[i] < limit:
                    quotients = np.uint32(quotients + np.uint32(part[i] >> np.uint32(parameter)))
                else:
                    escaped = np.uint32(escaped + np.uint32(1))
            full = np.int64(escaped)
            bits = np.int64(quotients) + ESCAPE * full + part.size
            cost = bits + (part.size - full) * parameter + 32 * full
            if best < 0 or cost < best:
                best, best_unary, best_escapes, best_parameter = cost, bits, full, np.int64(parameter)
        parameters[block] = best_parameter
        unary += best_unary
        low += (part.size - best_escapes) * best_parameter
        escapes += best_escapes
    return int(unary), int(low), int(escapes)


@compiled
def write(gaps: Gaps, parameters: Octets, quotients: Words, low: Words, escapes: Gaps) -> None:
    """Fill in quotients, low parts (both zero before) and escaped gaps."""
    unary = remainder = np.int64(0)  # bits that do not fill a word yet
    unary_bits = remainder_bits = np.int64(0)
    unary_words = remainder_words = escaped = 0
    for block in range(parameters.size):
        parameter = np.int64(parameters[block])
        mask = (1 << parameter) - 1
        for i in range(block * BLOCK, min((block + 1) * BLOCK, gaps.size)):
            gap = np.int64(gaps[i])
            quotient = gap >> parameter
            if quotient >= ESCAPE:
                quotient = np.int64(ESCAPE)
                escapes[escaped] = gap
                escaped += 1
            else:
                remainder |= (gap & mask) << remainder_bits
                remainder_bits += parameter
                if remainder_bits >= 32:
                    low[remainder_words] = remainder & 0xFFFFFFFF
                    remainder_words += 1
                    remainder >>= 32
                    remainder_bits -= 32
            unary |= np.int64(1) << (unary_bits + quotient)
            unary_bits += quotient + 1
            if unary_bits >= 32:
                quotients[unary_words] = unary & 0xFFFFFFFF
                unary_words += 1
                unary >>= 32
                unary_bits -= 32
    if unary_bits:
        quotients[unary_words] = unary
    if remainder_bits:
        low[remainder_words] = remainder


@compiled
def read_quotients(quotients: Words, parameters: Octets, runs: Offsets) -> tuple[int, int]:
    """Fill in the quotients (16 for escaped ones); the section must have as many 1 bits as there are entries.

    Returns bits of the low parts and escapes; (-1, -1) where a quotient exceeds 16.
    """
    previous = np.int64(-1)
    entry = 0
    longest = np.int64(0)
    for number in range(quotients.size):
        word = np.int64(quotients[number])
        while word:
            lowest = word & -word
            place = 32 * number + _PLACES[((lowest * _DE_BRUIJN) & 0xFFFFFFFF) >> 27]
            run = place - previous - 1
            longest = max(longest, run)
            runs[entry] = run
            previous = place
            entry += 1
            word ^= lowest
    if longest > ESCAPE:
        return -1, -1
    low = escapes = np.int64(0)
    for block in range(parameters.size):
        part = runs[block * BLOCK : (block + 1) * BLOCK]
        escaped = np.int64(0)
        for run in part:
            escaped += np.int64(run == ESCAPE)
        low += (part.size - escaped) * np.int64(parameters[block])
        escapes += escaped
    return int(low), int(escapes)


@compiled
def join(runs: Offsets, parameters: Octets, low: Words, escapes: Gaps) -> bool:
    """Turn quotients into offsets, in place; return False where an escaped gap need not have been escaped."""
    buffered = buffered_bits = np.int64(0)
    read = escaped = 0
    offset = np.int64(-1)
    for block in range(parameters.size):
        parameter = np.int64(parameters[block])
        mask = (1 << parameter) - 1
        for i in range(block * BLOCK, min((block + 1) * BLOCK, runs.size)):
            gap = runs[i]
            if gap == ESCAPE:
                gap = np.int64(escapes[escaped])
                escaped += 1
                if gap >> parameter < ESCAPE:
                    return False
            else:
                if buffered_bits < parameter:
                    buffered |= np.int64(low[read]) << buffered_bits
                    read += 1
                    buffered_bits += 32
                gap = (gap << parameter) | (buffered & mask)
                buffered >>= parameter
                buffered_bits -= parameter
            offset += gap + 1
            runs[i] = offset
    return True

"""The compiled loops of the index codecs: one call writes a chunk's offsets, one call reads and checks them.

Bits are in uint64 words, lowest bit first; mixed with signed integers numba would make floats of them.
"""

# mypy: ignore-errors

import numpy as np

from pscore.jit import compiled

# The constants of the Rice format stand here because numba's cache watches the file of a function and no other.
BLOCK = 512
"""Entries that share a parameter."""

ESCAPE = 16
"""Quotient from which a gap is written in full."""

MAX_PARAMETER = 27
"""The largest for which every gap that needs no escape has 31 bits."""

BAD_PARAMETER, BAD_COUNT, BAD_QUOTIENT, BAD_SIZE, BAD_PADDING, BAD_ESCAPE = range(1, 7)

_LONGEST = ESCAPE + 1 + 32  # bits of an escaped entry
_0, _1, _2, _4, _6, _8, _48, _56, _63 = (np.uint64(number) for number in (0, 1, 2, 4, 6, 8, 48, 56, 63))
_PAIRS, _FOURS, _EIGHTS = (np.uint64(mask) for mask in (0x5555555555555555, 0x3333333333333333, 0x0F0F0F0F0F0F0F0F))
_ONES, _ESCAPE = np.uint64(0x0101010101010101), np.uint64(ESCAPE)


@compiled
def count_ones(word):
    """Return the number of 1 bits of a uint64; the compiler makes one instruction of this.

    Of ``~word & (word − 1)`` it is the place of the lowest 1 bit of ``word``, in one instruction too.
    """
    bits = word - ((word >> _1) & _PAIRS)
    bits = (bits & _FOURS) + ((bits >> _2) & _FOURS)
    return np.int64((((bits + (bits >> _4)) & _EIGHTS) * _ONES) >> _56)


@compiled
def copy(octets, out):
    """Fill ``out``; assigning to a slice would cost the compiler seconds."""
    for i in range(out.size):
        out[i] = octets[i]


@compiled
def words_of(data):
    """Return bytes (uint8) as uint64 words, with zeros behind: two words more than there are whole ones."""
    words = np.zeros(data.size // 8 + 2, np.uint64)
    copy(data, words.view(np.uint8)[: data.size])
    return words


@compiled
def write_rice(offsets, base):
    """Return the bytes (uint8) of the offsets (int64, rising) minus ``base``, each block with its cheapest parameter.

    Of equally cheap parameters the lowest is written.
    """
    blocks = -(-offsets.size // BLOCK)
    parameters = np.empty(blocks, np.uint8)
    quotients = np.empty(offsets.size * (ESCAPE + 1) // 64 + 2, np.uint64)
    low = np.empty(offsets.size * MAX_PARAMETER // 64 + 2, np.uint64)
    escapes = np.empty(offsets.size, np.uint32)
    gaps = np.empty(BLOCK, np.uint32)
    unary = remainder = _0  # words that are not full yet
    place = width = words = low_words = escaped = 0
    previous = np.int64(base) - 1
    for block in range(blocks):
        part = offsets[block * BLOCK : (block + 1) * BLOCK]
        size, first = part.size, part[0] - previous - 1
        gaps[0] = first
        total = largest = np.int64(first)
        for i in range(1, size):
            gap = part[i] - part[i - 1] - 1
            gaps[i] = gap
            total += gap
            largest = max(largest, gap)
        previous = part[-1]

        guess = 0  # near the best for gaps at random places: a bound then rules the others out
        while guess < MAX_PARAMETER and (total >> guess) * 7 > 10 * size:
            guess += 1
        best, parameter = np.int64(-1), np.int64(guess)
        for turn in range(-1, MAX_PARAMETER + 1):
            candidate = np.int64(guess if turn < 0 else turn)
            if best >= 0:
                # A gap costs min(_LONGEST, (gap + 1) / 2 ** candidate + candidate) or more: above the chord of that.
                none = candidate + 0.5**candidate
                chord = min(np.float64(_LONGEST), largest * 0.5**candidate + none) - none
                least = size * none + chord * (total / max(largest, np.int64(1)))
                if least > best + 0.5 or (candidate > parameter and least > best - 0.5):
                    if candidate > parameter and size * (1 + candidate) >= best:  # an entry never costs less
                        break
                    continue
            limit, shift = np.uint32(ESCAPE << candidate), np.uint32(candidate)
            sums = over = np.uint32(0)  # narrow, for wide vectors
            for i in range(size):
                if gaps[i] < limit:
                    sums = np.uint32(sums + np.uint32(gaps[i] >> shift))
                else:
                    over = np.uint32(over + np.uint32(1))
            cost = np.int64(sums) + (size - np.int64(over)) * (1 + candidate) + _LONGEST * np.int64(over)
            if best < 0 or cost < best or (cost == best and candidate < parameter):
                best, parameter = cost, candidate

        parameters[block] = parameter
        for i in range(size):  # in loops of their own: quotients, then low bits, then escapes
            place += np.int64(min(gaps[i] >> np.uint32(parameter), np.uint32(ESCAPE)))
            if place >= 64:
                quotients[words] = unary
                words += 1
                place -= 64
                unary = _0
            unary |= _1 << np.uint64(place)
            place += 1
        shift, mask, written = np.uint64(parameter), (_1 << np.uint64(parameter)) - _1, 0
        if largest >> parameter < ESCAPE and parameter <= 16:
            written = size // 4 * 4
            for i in range(0, written, 4):
                four = (np.uint64(gaps[i]) & mask) | (np.uint64(gaps[i + 1]) & mask) << shift
                next_two = (np.uint64(gaps[i + 2]) & mask) | (np.uint64(gaps[i + 3]) & mask) << shift
                four |= next_two << (shift + shift)
                remainder |= four << np.uint64(width)
                width += 4 * parameter
                if width >= 64:
                    low[low_words] = remainder
                    low_words += 1
                    width -= 64
                    remainder = (four >> _1) >> np.uint64(4 * parameter - width - 1)
        for i in range(written, size):
            gap = np.uint64(gaps[i])
            if gap >> shift < _ESCAPE:
                remainder |= (gap & mask) << np.uint64(width)
                width += parameter
                if width >= 64:
                    low[low_words] = remainder
                    low_words += 1
                    width -= 64
                    remainder = (gap & mask) >> np.uint64(parameter - width)
            else:
                escapes[escaped] = gaps[i]
                escaped += 1
    quotients[words], low[low_words] = unary, remainder

    unary_size, low_size = -(-(64 * words + place) // 8), -(-(64 * low_words + width) // 8)
    data = np.empty(4 + blocks + unary_size + low_size + 4 * escaped, np.uint8)
    for i in range(4):
        data[i] = (unary_size >> 8 * i) & 255
    copy(parameters, data[4 : 4 + blocks])
    copy(quotients.view(np.uint8), data[4 + blocks : 4 + blocks + unary_size])
    copy(low.view(np.uint8), data[4 + blocks + unary_size : data.size - 4 * escaped])
    copy(escapes.view(np.uint8), data[data.size - 4 * escaped :])
    return data


@compiled
def read_rice(data, unary_size, count, base, offsets):
    """Fill in ``count`` offsets (int64, rising) plus ``base`` from bytes (uint8); check all but the end of the span.

    ``data`` is at least as long as header, parameters and ``unary_size`` say, and ``offsets`` has ``count`` places, or
    fewer if the quotients have fewer bits. Returns 0, or what is wrong, and two numbers that describe it.
    """
    blocks = -(-count // BLOCK)
    start = 4 + blocks
    parameters = data[4:start]
    low_bits = np.int64(0)
    for block in range(blocks):
        if parameters[block] > MAX_PARAMETER:
            return BAD_PARAMETER, 0, 0
        low_bits += np.int64(parameters[block]) * min(BLOCK, count - block * BLOCK)

    words = words_of(data[start:])
    whole = unary_size // 8
    last = words[whole] & ((_1 << np.uint64(8 * (unary_size % 8))) - _1)  # the bytes behind are low bits

    # The numbers of quotients and of escapes: a word without a long run of zeros needs no look at each bit.
    ones = escaped = zeros = longest = 0
    for number in range(whole + 1):
        word = words[number] if number < whole else last
        long = ~word
        long &= long >> _1
        long &= long >> _2
        long &= long >> _4
        long &= long >> _8
        if long == _0 and zeros + count_ones(~word & (word - _1)) < ESCAPE:
            ones += count_ones(word)
            top = word >> _48
            top |= top >> _1
            top |= top >> _2
            top |= top >> _4
            top |= top >> _8
            zeros = 16 - count_ones(top)
            continue
        for place in range(64):
            if (word >> np.uint64(place)) & _1:
                longest = max(longest, zeros)
                if zeros == ESCAPE and ones < count:
                    escaped += 1
                    low_bits -= parameters[ones // BLOCK]
                ones += 1
                zeros = 0
            else:
                zeros += 1
    if ones != count or (unary_size and not data[start + unary_size - 1]):
        return BAD_COUNT, ones, 0
    if longest > ESCAPE:
        return BAD_QUOTIENT, 0, 0
    low_size = -(-low_bits // 8)
    if data.size != start + unary_size + low_size + 4 * escaped:
        return BAD_SIZE, low_bits, escaped
    if low_bits % 8 and data[start + unary_size + low_size - 1] >> low_bits % 8:
        return BAD_PADDING, 0, 0

    escape = data.size - 4 * escaped
    offset = np.int64(base) - 1
    bit = np.uint64(8 * unary_size)
    number, word, previous = 0, words[0], np.int64(-1)
    for block in range(blocks):
        width = np.uint64(parameters[block])
        mask = (_1 << width) - _1
        part = offsets[block * BLOCK : (block + 1) * BLOCK]
        for i in range(part.size):
            while word == _0:
                number += 1
                word = words[number]
                previous -= 64
            place = count_ones(~word & (word - _1))  # of the lowest 1 bit
            word &= word - _1
            quotient = place - previous - 1
            previous = place
            if quotient == ESCAPE:
                gap = np.int64(0)
                for j in range(4):
                    gap |= np.int64(data[escape + j]) << 8 * j
                escape += 4
                if gap >> np.int64(width) < ESCAPE:
                    return BAD_ESCAPE, 0, 0
            else:
                rest = (words[bit >> _6] >> (bit & _63)) | ((words[(bit >> _6) + _1] << _1) << (_63 - (bit & _63)))
                gap = np.int64((np.uint64(quotient) << width) | (rest & mask))
                bit += width
            offset += gap + 1
            part[i] = offset
    return 0, 0, 0


@compiled
def read_raw(words, base, offsets):
    """Fill in offsets (int64) from uint32 ones, plus ``base``; return whether they rise strictly."""
    falls, previous = np.int64(0), np.int64(-1)
    for i in range(words.size):
        word = np.int64(words[i])
        offsets[i] = word + base
        falls |= np.int64(word <= previous)
        previous = word
    return falls == 0


@compiled
def read_bitmap(data, count, base, offsets):
    """Fill in the places of the 1 bits of bytes (uint8), plus ``base``, if there are ``count``; return how many are."""
    words, ones = words_of(data), np.int64(0)
    for word in words:
        ones += count_ones(word)
    if ones != count or offsets.size != count:
        return ones
    entry, start = 0, np.int64(base)
    for word in words:
        while word != _0:
            offsets[entry] = start + count_ones(~word & (word - _1))
            entry += 1
            word &= word - _1
        start += 64
    return ones


@compiled
def read_runs(starts, ends, offsets):
    """Fill in the offsets (int64) of runs that begin at ``starts``; return whether they rise strictly.

    ``ends`` rises, up to the last place of ``offsets``.
    """
    place, least = np.int64(0), starts[0] if starts.size else np.int64(0)
    for run in range(starts.size):
        if starts[run] < least:
            return False
        least = starts[run] + ends[run] - place + 1
        shift = starts[run] - place
        for i in range(place, ends[run] + 1):
            offsets[i] = i + shift
        place = ends[run] + 1
    return True

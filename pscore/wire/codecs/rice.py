"""Gaps in Golomb-Rice codes, with a parameter per block and an escape: near the entropy of a random support.

docs/wire-format.md has the bytes. Quotients, low bits and escaped gaps stand in sections of their own. There is one way
to write given gaps with given parameters. An entry costs at most 49 bits, and reading it a constant number of steps.
"""

import math

import numpy as np
from numpy.typing import NDArray

from pscore.wire.codecs import rice_loops as steps
from pscore.wire.codecs.format import IndexFormat, Offsets, is_compiled
from pscore.wire.codecs.rice_loops import BLOCK, ESCAPE, MAX_PARAMETER, Octets, Words
from pscore.wire.errors import ErrorCode, Rejected


def _encode(offsets: Offsets, length: int) -> bytes:
    gaps = np.empty(offsets.size, np.uint32)
    parameters = np.zeros(-(-offsets.size // BLOCK), np.uint8)
    unary_bits, low_bits, escaped = steps.plan(np.ascontiguousarray(offsets), gaps, parameters)
    quotients, low = np.zeros(-(-unary_bits // 32), np.uint32), np.zeros(-(-low_bits // 32), np.uint32)
    escapes = np.zeros(escaped, np.uint32)
    steps.write(gaps, parameters, quotients, low, escapes)
    size = -(-unary_bits // 8)
    sections = size.to_bytes(4, "little"), parameters.tobytes(), _bytes_of(quotients, size)
    return b"".join((*sections, _bytes_of(low, -(-low_bits // 8)), escapes.astype("<u4").tobytes()))


def _read(data: bytes, count: int, length: int) -> Offsets:
    blocks = -(-count // BLOCK)
    if len(data) < 4 + blocks:
        raise Rejected(ErrorCode.BAD_CHUNK, f"{len(data)} index bytes for {blocks} blocks of Rice codes")
    octets = np.frombuffer(data, np.uint8)
    parameters, rest = octets[4 : 4 + blocks], octets[4 + blocks :]
    size = int.from_bytes(data[:4], "little")
    if size > rest.size:
        raise Rejected(ErrorCode.BAD_CHUNK, f"{size} bytes of quotients declared, {rest.size} are there")
    if blocks and int(parameters.max()) > MAX_PARAMETER:
        raise Rejected(ErrorCode.BAD_CHUNK, f"a Rice parameter above {MAX_PARAMETER}")
    quotients, rest = rest[:size], rest[size:]
    ones = int(np.bitwise_count(quotients).sum(dtype=np.int64))
    if ones != count or (size and not quotients[-1]):
        raise Rejected(ErrorCode.BAD_CHUNK, f"{ones} quotients in {size} bytes for {count} entries")
    offsets = np.empty(count, np.int64)
    low_bits, escaped = steps.read_quotients(_words_of(quotients), parameters, offsets)
    if low_bits < 0:
        raise Rejected(ErrorCode.BAD_CHUNK, f"a quotient above {ESCAPE}")
    low_size = -(-low_bits // 8)
    if rest.size != low_size + 4 * escaped:
        raise Rejected(ErrorCode.BAD_CHUNK, f"{rest.size} bytes for {low_bits} low bits and {escaped} escaped gaps")
    if low_bits % 8 and rest[low_size - 1] >> low_bits % 8:
        raise Rejected(ErrorCode.BAD_CHUNK, "bits behind the last entry are not zero")
    escapes = np.frombuffer(data, "<u4", escaped, len(data) - 4 * escaped).astype(np.uint32)
    if not steps.join(offsets, parameters, _words_of(rest[:low_size]), escapes):
        raise Rejected(ErrorCode.BAD_CHUNK, "an escaped gap is short enough not to be escaped")
    return offsets


def _words_of(octets: Octets) -> Words:
    """Return a section's bytes as words, filled up with zeros."""
    return np.frombuffer(octets.tobytes() + bytes(-octets.size % 4), "<u4").astype(np.uint32)


def _bytes_of(words: NDArray[np.uint32], size: int) -> bytes:
    return words.astype("<u4").tobytes()[:size]


def _bits(count: int, length: int) -> float:
    absent = 1 - count / length
    if not absent:
        each = 1.0
    else:
        # The quotient of a geometric gap is geometric too; the best parameter makes its mean about 1.
        ideal = max(0, math.ceil(math.log2(math.log(0.618) / math.log(absent))))
        each = min(b + 1 / (1 - absent ** (1 << b)) for b in (max(0, ideal - 1), ideal, ideal + 1))
    return each * count + 8 * (4 + -(-count // BLOCK))


def _nanoseconds(count: int, length: int) -> float:
    # For few entries high enough for another codec to be chosen, so that a small model never waits for the compiler.
    return 2e4 + 9.0 * count if is_compiled(count) else 2e5 + 70.0 * count


RICE = IndexFormat("rice", _encode, _read, _bits, _nanoseconds)

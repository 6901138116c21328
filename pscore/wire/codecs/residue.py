"""The residue code: 16-bit words for a receiver that has words near them.

Words of fp16 and bf16 have an order: that of their numbers, negative ones below positive ones, −0 below +0. The code
sends the lowest ``k`` bits of a word's place in this order. The receiver takes the word that has these bits and is
nearest to its own. So the code may be read twice, also if a part of the words was written before. A word that is too
far from the receiver's is an escape, and is sent whole.

Layout: ``k`` (1 byte), number of escapes ``e`` and bytes of their places (uint32 each, little-endian), the places as
:mod:`~pscore.wire.codecs.rice` writes them, ``k`` bits of each other word, the lowest bit of the first byte first,
and the escapes: as this same code with a larger ``k``, or behind a byte of 16 the words themselves (uint16).
"""

import math
import struct

import numpy as np
from numpy.typing import NDArray

from pscore.wire.codecs.rice import RICE
from pscore.wire.errors import ErrorCode, Rejected

Words = NDArray[np.uint16]
"""uint16 ``[count]``: the bits of fp16 or bf16 values."""

UNKNOWN = 0xFFFF
"""Distance of a word of which nothing is known."""

_HEADER = struct.Struct("<BII")
_FEWEST_BITS, _MOST_BITS, _WHOLE = 2, 10, 16
_CHOICES = (*range(_FEWEST_BITS, _MOST_BITS + 1),)
_SIGN, _MAGNITUDE = np.uint16(0x8000), np.uint16(0x7FFF)


def places_of(words: Words) -> Words:
    """Return the place of each word in the order of all 65,536."""
    return np.where(words & _SIGN, _MAGNITUDE - (words & _MAGNITUDE), words | _SIGN)


def words_at(places: Words) -> Words:
    """Return the words at places in the order."""
    return np.where(places & _SIGN, places & _MAGNITUDE, (_MAGNITUDE - places) | _SIGN)


def encode(words: Words, distances: Words) -> bytes | None:
    """Write words, of which the receiver has others that are at most so many places away.

    Returns ``None`` if that would not be less than the words themselves.
    """
    levels = _levels(distances)
    data = _write(words, distances, levels) if levels else b""
    return data if 0 < len(data) < 2 * words.size else None  # the levels are chosen by an estimate


def _write(words: Words, distances: Words, levels: tuple[int, ...]) -> bytes:
    if not levels:
        return bytes([_WHOLE]) + words.astype("<u2").tobytes()
    bits, is_far = levels[0], distances >= 1 << levels[0] - 1
    escapes = np.flatnonzero(is_far)
    where = RICE.encode(escapes, words.size) if escapes.size else b""
    near = places_of(words[~is_far] if escapes.size else words).astype("<u2")
    residues = np.unpackbits(near.view(np.uint8).reshape(-1, 2), axis=1, bitorder="little")
    packed = np.packbits(residues[:, :bits], bitorder="little").tobytes()
    rest = _write(words[escapes], distances[escapes], levels[1:]) if escapes.size else b""
    return _HEADER.pack(bits, escapes.size, len(where)) + where + packed + rest


def _levels(distances: Words) -> tuple[int, ...]:
    """Return the bits of the residues, of those of the escapes, and so on; nothing if words are fewer bytes."""
    far = [distances.size, *(int(np.count_nonzero(distances >= 1 << bits - 1)) for bits in _CHOICES)]
    best: dict[int, tuple[float, tuple[int, ...]]] = {}
    for level in range(len(_CHOICES), -1, -1):  # escapes that were too far for the level before
        count = far[level]
        options: list[tuple[float, tuple[int, ...]]] = [(8.0 + 16 * count if count else 0.0, ())]
        for further, bits in enumerate(_CHOICES[level:], start=level + 1):
            size, levels = best[further]
            spent = 8 * _HEADER.size + bits * (count - far[further]) + _place_bits(far[further], count)
            options.append((spent + size, (bits, *levels)))
        best[level] = min(options) if count else options[0]
    return best[0][1]


def _place_bits(escapes: int, count: int) -> float:
    if not 0 < escapes < count:
        return float(count)
    share = escapes / count
    return 48 - count * (share * math.log2(share) + (1 - share) * math.log2(1 - share)) * 1.05


def decode(data: bytes, own: Words) -> Words:
    """Read as many words as there are of the receiver's own; raises :class:`Rejected` (``BAD_CHUNK``)."""
    return _read(memoryview(data), own, _FEWEST_BITS)


def _read(data: memoryview, own: Words, fewest_bits: int) -> Words:
    count = own.size
    if len(data) == 1 + 2 * count and data[0] == _WHOLE:
        return np.frombuffer(data, "<u2", count, 1).astype(np.uint16)
    if len(data) < _HEADER.size:
        raise Rejected(ErrorCode.BAD_CHUNK, f"{len(data)} bytes of residues for {count} entries")
    bits, escapes, where_bytes = _HEADER.unpack_from(data)
    if not fewest_bits <= bits <= _MOST_BITS:
        raise Rejected(ErrorCode.BAD_CHUNK, f"residues of {bits} bits, and not {fewest_bits} to {_MOST_BITS}")
    near = count - escapes
    packed_bytes = -(-max(0, near) * bits // 8)
    start = _HEADER.size + where_bytes
    end = start + packed_bytes
    if near < 0 or end > len(data) or (end < len(data)) != bool(escapes) or bool(where_bytes) != bool(escapes):
        raise Rejected(ErrorCode.BAD_CHUNK, f"{len(data)} bytes of residues with {escapes} escapes of {count} entries")
    words, is_near = np.empty(count, np.uint16), np.ones(count, np.bool_)
    if escapes:
        places = RICE.decode(bytes(data[_HEADER.size : start]), escapes, count)
        is_near[places] = False
        words[places] = _read(data[end:], own[places], bits + 1)
    packed = np.frombuffer(data, np.uint8, packed_bytes, start)
    if near * bits % 8 and packed[-1] >> near * bits % 8:
        raise Rejected(ErrorCode.BAD_CHUNK, "bits behind the last residue are not zero")
    residues = _unpacked(packed, near, bits)
    mine = places_of(own[is_near] if escapes else own)
    span = np.uint16(1 << bits)
    ahead = (residues - mine) & (span - np.uint16(1))
    words[is_near] = words_at(mine + ahead - np.where(ahead >= span >> np.uint16(1), span, np.uint16(0)))  # modulo 2^16
    return words


def _unpacked(packed: NDArray[np.uint8], count: int, bits: int) -> Words:
    each = np.unpackbits(packed, count=count * bits, bitorder="little").reshape(count, bits)
    whole = np.zeros((count, 16), np.uint8)
    whole[:, :bits] = each
    return np.packbits(whole, axis=1, bitorder="little").view("<u2").reshape(count).astype(np.uint16)

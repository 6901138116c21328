"""The arrays behind the sections of the Rice format, and the steps that both implementations offer."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pscore.wire.codecs.index.format import Gaps, Offsets

Octets = NDArray[np.uint8]

Words = NDArray[np.uint32]
"""A section of bits: bit ``i`` is bit ``i % 32`` of word ``i // 32``."""


def words_for(bits: int) -> Words:
    """Return an empty section for so many bits."""
    return np.zeros(-(-bits // 32), np.uint32)


def words_of(octets: Octets) -> Words:
    """Return a section's bytes as words, filled up with zeros."""
    return np.frombuffer(octets.tobytes() + bytes(-octets.size % 4), "<u4").astype(np.uint32)


def bytes_of(words: Words, bits: int) -> bytes:
    """Return the bytes of the first ``bits`` bits of a section."""
    return words.astype("<u4").tobytes()[: -(-bits // 8)]


class Steps(NamedTuple):
    """One implementation of the four steps; all give the same bytes.

    Attributes:
        plan: from offsets, fill in the gaps and each block's cheapest parameter (the lowest of equals); return bits of
            quotients, bits of low parts, and escapes.
        write: from gaps and parameters, fill in quotients, low parts (both zero before) and escaped gaps.
        read_quotients: from that section and the parameters, fill in int64 quotients (16 for escaped ones);
            return bits of low parts and escapes, or (-1, -1) where a quotient exceeds 16. The caller has
            checked that the section has as many 1 bits as there are entries.
        join: from quotients, parameters, low parts and escaped gaps, turn the quotients into offsets, in place; return
            False where an escaped gap need not have been.
    """

    plan: Callable[[Offsets, Gaps, Octets], tuple[int, int, int]]
    write: Callable[[Gaps, Octets, Words, Words, Gaps], None]
    read_quotients: Callable[[Words, Octets, Offsets], tuple[int, int]]
    join: Callable[[Offsets, Octets, Words, Gaps], bool]

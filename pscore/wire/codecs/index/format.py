"""The interface of an index codec."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pscore.wire.errors import ErrorCode, Rejected

Offsets = NDArray[np.int64]
"""int64 ``[count]``, strictly increasing, from 0."""


@dataclass(frozen=True, slots=True)
class IndexFormat:
    """How strictly increasing offsets in ``[0, length)`` are written, for a length of at most 2³².

    Attributes:
        name: what settings and reports call it.
        encode: offsets and length to bytes.
        decode: bytes, count and length to offsets. Raises :class:`Rejected` (``BAD_CHUNK``) where the bytes are not
            exactly such offsets, before allocating more than a small multiple of the bytes or of the count.
        bits: estimate of the bits that ``count`` entries at random places of ``length`` need, from both numbers.
        nanoseconds: estimate of encoding plus decoding them on one core; measured as docs/wire-format.md says.
    """

    name: str
    encode: Callable[[Offsets, int], bytes]
    decode: Callable[[bytes, int, int], Offsets]
    bits: Callable[[int, int], float]
    nanoseconds: Callable[[int, int], float]


def check_end(offsets: Offsets, length: int) -> None:
    """Refuse ascending offsets whose last lies outside a span of ``length`` elements."""
    if offsets.size and int(offsets[-1]) >= length:
        raise Rejected(ErrorCode.BAD_CHUNK, f"index {int(offsets[-1])} lies outside a span of {length} elements")

"""The interfaces of index and value codecs, and the limits that all codecs share."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pscore.wire.errors import ErrorCode, Rejected

Offsets = NDArray[np.int64]
"""int64 ``[count]``, strictly increasing, from 0."""

Values = NDArray[np.float32]
"""fp32 ``[count]``."""

MAX_ENTRIES = 1 << 22
"""Entries in one chunk. Some codecs need a bit an entry or less, so the bytes alone do not bound the memory.

4 Mi entries are 16 MiB of fp32 values and 32 MiB of int64 offsets; a chunk of 2 MiB with 4-bit values has as many.
"""


@dataclass(frozen=True, slots=True)
class IndexFormat:
    """How strictly increasing offsets in ``[0, length)`` are written, for a length of at most 2³².

    Attributes:
        write: offsets plus a base, the length, and the base, to bytes.
        read: bytes, count, length and base to offsets that rise strictly, plus the base. Raises :class:`Rejected`
            (``BAD_CHUNK``) for other bytes, before allocating more than a small multiple of the bytes or of the count.
        bits: estimate of the bits that ``count`` entries of ``length`` need, which are ``runs`` runs of neighbours;
            from these three numbers. Runs, or single entries, are at random places.
        nanoseconds: estimate of encoding plus decoding them on one core, as docs/reference/wire-format.md says.
    """

    name: str
    write: Callable[[Offsets, int, int], bytes]
    read: Callable[[bytes, int, int, int], Offsets]
    bits: Callable[[int, int, int], float]
    nanoseconds: Callable[[int, int, int], float]

    def encode(self, offsets: Offsets, length: int, base: int = 0) -> bytes:
        """Write offsets that count from ``base``."""
        return self.write(np.ascontiguousarray(offsets), length, base)

    def decode(self, data: bytes, count: int, length: int, base: int = 0) -> Offsets:
        """Read ``count`` offsets and add ``base``; raises :class:`Rejected` (``BAD_CHUNK``)."""
        check_count(count)
        offsets = self.read(data, count, length, base)
        if count and (last := int(offsets[-1]) - base) >= length:
            raise Rejected(ErrorCode.BAD_CHUNK, f"index {last} lies outside a span of {length} elements")
        return offsets


@dataclass(frozen=True, slots=True)
class ValueFormat:
    """How values are written, in blocks that share their bounds.

    A decoder uses correctly rounded operations only (no exp, no fused multiply-add). Sender and receiver then get the
    same fp32 values bit for bit on any machine, and the sender knows the error.

    Attributes:
        bits: of each value, without the bounds.
        exact: True if decoding restores every finite fp32 value.
        write: contiguous finite values to bytes, and to the values that are read from them. A magnitude beyond the
            format's largest becomes the largest.
        read: bytes of the right length, and the count, to finite values of their own memory. Raises
            :class:`Rejected` (``BAD_CHUNK``, ``NON_FINITE``).
        block: values that share bounds; 1 if there are none.
        bound_bytes: bytes of a block's bounds.
    """

    name: str
    bits: int
    exact: bool
    write: Callable[[Values], tuple[bytes, Values]]
    read: Callable[[bytes, int], Values]
    block: int = 1
    bound_bytes: int = 0

    def size(self, count: int) -> int:
        """Bytes that ``count`` values need."""
        return -(-count // self.block) * self.bound_bytes + -(-count * self.bits // 8)

    def encode(self, values: Values) -> tuple[bytes, Values]:
        """Write finite values; return the bytes and the values that the receiver will decode from them."""
        return self.write(np.ascontiguousarray(values))

    def decode(self, data: bytes, count: int) -> Values:
        """Read ``count`` finite values; raises :class:`Rejected` (``BAD_CHUNK`` before allocating; ``NON_FINITE``)."""
        check_count(count)
        if len(data) != self.size(count):
            raise Rejected(ErrorCode.BAD_CHUNK, f"{len(data)} value bytes, {count} entries in {self.name} need others")
        return self.read(data, count)


def check_count(count: int) -> None:
    """Raise :class:`Rejected` (``BAD_CHUNK``) if one chunk may not have so many entries."""
    if not 0 <= count <= MAX_ENTRIES:
        raise Rejected(ErrorCode.BAD_CHUNK, f"{count} entries in one chunk, at most {MAX_ENTRIES} are taken")

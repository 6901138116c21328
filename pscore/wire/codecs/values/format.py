"""The interface of a value codec."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pscore.wire.errors import ErrorCode, Rejected

Values = NDArray[np.float32]
"""fp32 ``[count]``."""


@dataclass(frozen=True, slots=True)
class ValueFormat:
    """How values are written, in blocks that share their bounds.

    A decoder uses correctly rounded operations only (no exp, no fused multiply-add). Sender and receiver then get the
    same fp32 values bit for bit on any machine, and the sender knows the error.

    Attributes:
        name: what settings and reports call it.
        bits: of each value, without the bounds.
        exact: True where decoding restores every finite fp32 value.
        write: contiguous finite values to bytes.
        read: bytes of the right length, and the count, to values.
        block: values that share bounds; 1 where there are none.
        bound_bytes: bytes of a block's bounds.
    """

    name: str
    bits: int
    exact: bool
    write: Callable[[Values], bytes]
    read: Callable[[bytes, int], Values]
    block: int = 1
    bound_bytes: int = 0

    def size(self, count: int) -> int:
        """Bytes that ``count`` values need."""
        return -(-count // self.block) * self.bound_bytes + -(-count * self.bits // 8)

    def encode(self, values: Values) -> tuple[bytes, Values]:
        """Write finite values; return the bytes and the values that the receiver will decode from them.

        A magnitude beyond the format's largest becomes the largest.
        """
        data = self.write(np.ascontiguousarray(values))
        return data, values if self.exact else self.read(data, values.size)

    def decode(self, data: bytes, count: int) -> Values:
        """Read ``count`` values, all finite; raises :class:`Rejected`.

        ``BAD_CHUNK`` where the bytes are not exactly so many values, before anything is allocated; ``NON_FINITE`` where
        a value or a bound is infinite or no number.
        """
        if len(data) != self.size(count):
            raise Rejected(ErrorCode.BAD_CHUNK, f"{len(data)} value bytes, {count} entries in {self.name} need others")
        values = self.read(data, count)
        if not np.isfinite(values).all():
            raise Rejected(ErrorCode.NON_FINITE, f"a {self.name} value is not finite")
        return values

"""What a value codec is."""

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

    A decoder works with correctly rounded operations only (no exp, no fused multiply-add), so that sender and receiver
    get the same fp32 values bit for bit on any machine; that is what lets a sender keep the error.

    Attributes:
        name: what settings and reports call it.
        bits: of each value, the bounds not counted.
        exact: True where every finite fp32 value comes back as it was.
        write: contiguous finite values to bytes; the decoded values follow from these by ``read``.
        read: bytes and count to values; ``decode`` has checked the length.
        block: values that share bounds; 1 where there are none.
        bound_bytes: of each block's bounds.
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
        """Write values, which must be finite; return the bytes and what the receiver will decode from them.

        Magnitudes beyond the largest that the format has become that one.
        """
        data = self.write(np.ascontiguousarray(values))
        return data, values if self.exact else self.read(data, values.size)

    def decode(self, data: bytes, count: int) -> Values:
        """Read ``count`` values, all finite.

        Raises:
            Refusal: ``BAD_CHUNK`` where the bytes are not exactly so many values, before anything is allocated;
                ``NON_FINITE`` where a value or a bound is infinite or no number.
        """
        if len(data) != self.size(count):
            raise Rejected(ErrorCode.BAD_CHUNK, f"{len(data)} value bytes, {count} entries in {self.name} need others")
        values = self.read(data, count)
        if not np.isfinite(values).all():
            raise Rejected(ErrorCode.NON_FINITE, f"a {self.name} value is not finite")
        return values

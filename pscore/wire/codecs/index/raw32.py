"""Raw offsets: little-endian uint32, the plainest of all and the one that every peer reads."""

import numpy as np

from pscore.wire.codecs.index.format import IndexFormat, Offsets, check_end
from pscore.wire.errors import ErrorCode, Rejected


def _encode(offsets: Offsets, length: int) -> bytes:
    return offsets.astype("<u4").tobytes()


def _decode(data: bytes, count: int, length: int) -> Offsets:
    if len(data) != 4 * count:
        raise Rejected(ErrorCode.BAD_CHUNK, f"{len(data)} index bytes for {count} entries of 4 bytes")
    offsets = np.frombuffer(data, "<u4").astype(np.int64)
    if not (offsets[1:] > offsets[:-1]).all():
        raise Rejected(ErrorCode.BAD_CHUNK, "indices are unsorted or repeated")
    check_end(offsets, length)
    return offsets


RAW32 = IndexFormat(
    "raw32",
    _encode,
    _decode,
    bits=lambda count, length: 32.0 * count,
    nanoseconds=lambda count, length: 3e3 + 1.4 * count,
)

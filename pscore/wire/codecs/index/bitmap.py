"""Bitmap: one bit an element of the span, lowest bit of the first byte first. For densities from a third up."""

import numpy as np

from pscore.wire.codecs.index.format import IndexFormat, Offsets
from pscore.wire.errors import ErrorCode, Rejected


def _encode(offsets: Offsets, length: int) -> bytes:
    present = np.zeros(length, np.uint8)
    present[offsets] = 1
    return np.packbits(present, bitorder="little").tobytes()


def _decode(data: bytes, count: int, length: int) -> Offsets:
    if len(data) != -(-length // 8):
        raise Rejected(ErrorCode.BAD_CHUNK, f"{len(data)} index bytes for a bitmap of {length} elements")
    packed = np.frombuffer(data, np.uint8)
    if length % 8 and packed[-1] >> length % 8:
        raise Rejected(ErrorCode.BAD_CHUNK, "a bitmap has bits beyond its span")
    present = int(np.bitwise_count(packed).sum(dtype=np.int64))
    if present != count:
        raise Rejected(ErrorCode.BAD_CHUNK, f"a bitmap has {present} entries, the chunk says {count}")
    return np.flatnonzero(np.unpackbits(packed, bitorder="little").view(np.bool_))


BITMAP = IndexFormat(
    "bitmap",
    _encode,
    _decode,
    bits=lambda count, length: float(length),
    nanoseconds=lambda count, length: 5e3 + 1.0 * count + 1.0 * length,
)

"""The index codecs without compression.

RAW32: little-endian uint32 offsets, which every peer reads.
BITMAP: one bit an element of the span, lowest bit of the first byte first. For densities from a third up.
"""

import numpy as np

from pscore.wire.codecs.index.format import IndexFormat, Offsets, check_end
from pscore.wire.errors import ErrorCode, Rejected


def _encode_raw32(offsets: Offsets, length: int) -> bytes:
    return offsets.astype("<u4").tobytes()


def _decode_raw32(data: bytes, count: int, length: int) -> Offsets:
    if len(data) != 4 * count:
        raise Rejected(ErrorCode.BAD_CHUNK, f"{len(data)} index bytes for {count} entries of 4 bytes")
    offsets = np.frombuffer(data, "<u4").astype(np.int64)
    if not (offsets[1:] > offsets[:-1]).all():
        raise Rejected(ErrorCode.BAD_CHUNK, "indices are unsorted or repeated")
    check_end(offsets, length)
    return offsets


def _encode_bitmap(offsets: Offsets, length: int) -> bytes:
    present = np.zeros(length, np.uint8)
    present[offsets] = 1
    return np.packbits(present, bitorder="little").tobytes()


def _decode_bitmap(data: bytes, count: int, length: int) -> Offsets:
    if len(data) != -(-length // 8):
        raise Rejected(ErrorCode.BAD_CHUNK, f"{len(data)} index bytes for a bitmap of {length} elements")
    packed = np.frombuffer(data, np.uint8)
    if length % 8 and packed[-1] >> length % 8:
        raise Rejected(ErrorCode.BAD_CHUNK, "a bitmap has bits beyond its span")
    present = int(np.bitwise_count(packed).sum(dtype=np.int64))
    if present != count:
        raise Rejected(ErrorCode.BAD_CHUNK, f"a bitmap has {present} entries, the chunk says {count}")
    return np.flatnonzero(np.unpackbits(packed, bitorder="little").view(np.bool_))


RAW32 = IndexFormat(
    "raw32",
    _encode_raw32,
    _decode_raw32,
    bits=lambda count, length: 32.0 * count,
    nanoseconds=lambda count, length: 3e3 + 1.4 * count,
)
BITMAP = IndexFormat(
    "bitmap",
    _encode_bitmap,
    _decode_bitmap,
    bits=lambda count, length: float(length),
    nanoseconds=lambda count, length: 5e3 + 1.0 * count + 1.0 * length,
)

"""Gaps in Stream VByte (Lemire, Kurz, Rupp 2018), by the library libstreamvbyte: the fastest of the gap codecs.

A control byte for every four gaps, two bits each with the number of data bytes less one, lowest bits first; then the
data bytes, little-endian.
"""

import numpy as np

from pscore.wire.codecs.index.format import IndexFormat, Offsets, gaps_of, offsets_of
from pscore.wire.errors import ErrorCode, Rejected

_DATA_BYTES = np.array([sum((control >> shift & 3) + 1 for shift in (0, 2, 4, 6)) for control in range(256)])
"""Data bytes of the four gaps behind each control byte."""

_OVERREAD = bytes(32)
"""The library's vector loads may read past the last gap; they read these."""


def _encode(offsets: Offsets, length: int) -> bytes:
    import libstreamvbyte

    encoded: bytes = libstreamvbyte.encode(gaps_of(offsets)).tobytes()
    return encoded


def _decode(data: bytes, count: int, length: int) -> Offsets:
    import libstreamvbyte

    controls = -(-count // 4)
    if len(data) < controls + count:
        raise Rejected(ErrorCode.BAD_CHUNK, f"{len(data)} index bytes for {count} entries in Stream VByte")
    control = np.frombuffer(data, np.uint8, controls)
    unused = -count % 4  # of the last control byte; they must be zero and have no data byte
    if unused and control[-1] >> 2 * (4 - unused):
        raise Rejected(ErrorCode.BAD_CHUNK, "the last control byte speaks of entries that are not there")
    # The library's decoder trusts the control bytes: what it will read is counted here first.
    needed = controls + int(_DATA_BYTES[control].sum()) - unused
    if len(data) != needed:
        raise Rejected(ErrorCode.BAD_CHUNK, f"{len(data)} index bytes where the control bytes ask for {needed}")
    gaps = libstreamvbyte.decode(np.frombuffer(data + _OVERREAD, np.uint8), count)
    return offsets_of(gaps, length)


def _bits(count: int, length: int) -> float:
    absent = 1 - count / length
    return count * (10 + 8 * (absent**256 + absent**65536 + absent ** (1 << 24)))


STREAMVBYTE = IndexFormat("streamvbyte", _encode, _decode, _bits, nanoseconds=lambda count, length: 1.8e4 + 6.5 * count)

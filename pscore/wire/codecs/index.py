"""Index codecs by their number in the proto, and the choice between them; a test asserts that none is missing.

RAW32: little-endian uint32 offsets, which every peer reads.
BITMAP: one bit an element of the span, lowest bit of the first byte first. For densities from a third up.
RICE: :mod:`pscore.wire.codecs.rice`. RUNS: :mod:`pscore.wire.codecs.runs`. DENSE has no bytes and no format.
"""

from collections.abc import Collection

import numpy as np

from pscore.wire.codecs import index_loops as loops
from pscore.wire.codecs.format import IndexFormat, Offsets
from pscore.wire.codecs.rice import RICE
from pscore.wire.codecs.runs import RUNS
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

ASSUMED_LINK = 12.5e6
"""Bytes a second of a link of unknown rate: 100 Mbit/s. At this rate the fewest bytes nearly always win."""


def _write_raw32(offsets: Offsets, length: int, base: int) -> bytes:
    words = offsets.astype("<u4")  # of the low 32 bits: the difference has no more
    words -= np.uint32(base & 0xFFFFFFFF)
    return words.tobytes()


def _read_raw32(data: bytes, count: int, length: int, base: int) -> Offsets:
    if len(data) != 4 * count:
        raise Rejected(ErrorCode.BAD_CHUNK, f"{len(data)} index bytes for {count} entries of 4 bytes")
    words, offsets = np.frombuffer(data, "<u4"), np.empty(count, np.int64)
    if not loops.read_raw.on(count)(words, base, offsets):
        raise Rejected(ErrorCode.BAD_CHUNK, "indices are unsorted or repeated")
    return offsets


def _write_bitmap(offsets: Offsets, length: int, base: int) -> bytes:
    present = np.zeros(length, np.uint8)
    present[offsets - base if base else offsets] = 1
    return np.packbits(present, bitorder="little").tobytes()


def _read_bitmap(data: bytes, count: int, length: int, base: int) -> Offsets:
    if len(data) != -(-length // 8):
        raise Rejected(ErrorCode.BAD_CHUNK, f"{len(data)} index bytes for a bitmap of {length} elements")
    if length % 8 and data[-1] >> length % 8:
        raise Rejected(ErrorCode.BAD_CHUNK, "a bitmap has bits beyond its span")
    packed = np.frombuffer(data, np.uint8)
    offsets = np.empty(count if count <= length else 0, np.int64)
    present = loops.read_bitmap.on(packed.size)(packed, count, base, offsets)
    if present != count:
        raise Rejected(ErrorCode.BAD_CHUNK, f"a bitmap has {present} entries, the chunk says {count}")
    return offsets


INDEX_FORMATS: dict[int, IndexFormat] = {
    pb.INDEX_CODEC_RAW32: IndexFormat(
        "raw32",
        _write_raw32,
        _read_raw32,
        bits=lambda count, length, runs: 32.0 * count,
        nanoseconds=lambda count, length, runs: 3e3 + 1.2 * count,
    ),
    pb.INDEX_CODEC_BITMAP: IndexFormat(
        "bitmap",
        _write_bitmap,
        _read_bitmap,
        bits=lambda count, length, runs: float(length),
        nanoseconds=lambda count, length, runs: 5e3 + 1.2 * count + 0.4 * length,
    ),
    pb.INDEX_CODEC_RICE: RICE,
    pb.INDEX_CODEC_RUNS: RUNS,
}


def choose(
    count: int, length: int, link_bytes_per_second: float | None, allowed: Collection[int], runs: int | None = None
) -> int:
    """Return the codec that arrives first: bytes over the link's rate, plus the time to write and to read them.

    For ``1 ≤ count ≤ length`` entries, which are ``runs`` runs of neighbours; ``None``: at random places. The rate is
    ``None`` or 0 if it is not known. ``allowed`` are codecs that the peer reads; RAW32 is returned if none of them is
    known here.
    """
    rate = link_bytes_per_second or ASSUMED_LINK
    if runs is None:
        runs = max(1, round(count * (1 - count / length)))

    def seconds(codec: int) -> float:
        form = INDEX_FORMATS[codec]
        return form.bits(count, length, runs) / 8 / rate + form.nanoseconds(count, length, runs) * 1e-9

    return min((codec for codec in INDEX_FORMATS if codec in allowed), key=seconds, default=pb.INDEX_CODEC_RAW32)


def decode_offsets(codec: int, data: bytes, count: int, length: int, base: int = 0) -> Offsets:
    """Read ``count`` offsets, which rise strictly and stay below ``length``, and add ``base`` to them.

    Raises :class:`Rejected` (``BAD_CHUNK``, ``UNKNOWN_CODEC``).
    """
    if codec not in INDEX_FORMATS:
        raise Rejected(ErrorCode.UNKNOWN_CODEC, f"index codec {codec} is not known")
    return INDEX_FORMATS[codec].decode(data, count, length, base)

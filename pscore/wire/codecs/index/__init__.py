"""Index codecs by their number in the proto, and the choice between them; a test asserts that none is missing."""

from collections.abc import Collection

from pscore.wire.codecs.index.format import IndexFormat, Offsets
from pscore.wire.codecs.index.plain import BITMAP, RAW32
from pscore.wire.codecs.index.rice import RICE
from pscore.wire.codecs.limits import check_count
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

INDEX_FORMATS: dict[int, IndexFormat] = {
    pb.INDEX_CODEC_RAW32: RAW32,
    pb.INDEX_CODEC_BITMAP: BITMAP,
    pb.INDEX_CODEC_RICE: RICE,
}
"""Every index codec but DENSE, which has no bytes."""

ASSUMED_LINK = 12.5e6
"""Bytes a second of a link of unknown rate: 100 Mbit/s. At this rate the fewest bytes nearly always win."""


def choose(count: int, length: int, link_bytes_per_second: float | None, allowed: Collection[int]) -> int:
    """Return the codec that arrives first: bytes over the link's rate, plus the time to write and to read them.

    Args:
        count: entries at random places, at least 1.
        length: elements of the span, at least ``count``.
        link_bytes_per_second: ``None`` or 0 where the rate is not known.
        allowed: codecs that the peer reads, as numbers of the proto; RAW32 is returned if none of them is known here.
    """
    rate = link_bytes_per_second or ASSUMED_LINK

    def seconds(codec: int) -> float:
        form = INDEX_FORMATS[codec]
        return form.bits(count, length) / 8 / rate + form.nanoseconds(count, length) * 1e-9

    return min((codec for codec in INDEX_FORMATS if codec in allowed), key=seconds, default=pb.INDEX_CODEC_RAW32)


def decode_offsets(codec: int, data: bytes, count: int, length: int) -> Offsets:
    """Read ``count`` offsets, which rise strictly and stay below ``length``; raises :class:`Rejected`."""
    index_format = INDEX_FORMATS.get(codec)
    if index_format is None:
        raise Rejected(ErrorCode.UNKNOWN_CODEC, f"index codec {codec} is not known")
    check_count(count)
    return index_format.decode(data, count, length)

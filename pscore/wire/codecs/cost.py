"""Which index codec arrives first: bytes over the link's rate, plus the time to write and to read them."""

from collections.abc import Collection

from pscore.wire.codecs.index import INDEX_FORMATS
from pscore.wire.codecs.index.format import Offsets
from pscore.wire.v1 import parameter_server_pb2 as pb

ASSUMED_LINK = 12.5e6
"""Bytes a second taken for a link of unknown rate: 100 Mbit/s, the slowest that this system is made for.

Bytes decide at this rate wherever they differ by more than a few per cent.
"""

_SAMPLE = 8192
"""Entries encoded for a try: a twentieth of a chunk, enough for pcodec's histogram to pay for itself."""


def choose(count: int, length: int, link_bytes_per_second: float | None, allowed: Collection[int]) -> int:
    """Return the codec that should bring ``count`` entries at random places of ``length`` over soonest.

    Args:
        count: entries, at least 1.
        length: elements of the span, at least ``count``.
        link_bytes_per_second: rate of the link; ``None`` or 0 where it is not known.
        allowed: codecs that the peer reads, as numbers of the proto; RAW32 is taken if none of them is known here.
    """
    rate = link_bytes_per_second or ASSUMED_LINK
    known = [codec for codec in INDEX_FORMATS if codec in allowed]
    return min(known, key=lambda codec: _seconds(codec, count, length, rate), default=pb.INDEX_CODEC_RAW32)


def choose_for(offsets: Offsets, length: int, link_bytes_per_second: float | None, allowed: Collection[int]) -> int:
    """Return the codec for these very offsets: as :func:`choose`, but clusters are seen where they could matter.

    Real supports are not random, and pcodec's histogram gains up to half of Rice's bits on runs of neighbours. So where
    the link is slow enough for such a gain to pay for pcodec's time, a sample from the middle is written both ways.
    """
    count = offsets.size
    codec = choose(count, length, link_bytes_per_second, allowed)
    rate = link_bytes_per_second or ASSUMED_LINK
    rice, pcodec = pb.INDEX_CODEC_RICE, pb.INDEX_CODEC_PCODEC
    if codec != rice or pcodec not in allowed:
        return codec
    extra = _nanoseconds(pcodec, count, length) - _nanoseconds(rice, count, length)
    if INDEX_FORMATS[rice].bits(count, length) / 2 / 8 / rate < extra * 1e-9:
        return codec
    size = min(count, _SAMPLE)
    first = (count - size) // 2
    sample = offsets[first : first + size] - offsets[first]
    saved = len(INDEX_FORMATS[rice].encode(sample, length)) - len(INDEX_FORMATS[pcodec].encode(sample, length))
    return pcodec if saved * (count / size) / rate > extra * 1e-9 else rice


def _seconds(codec: int, count: int, length: int, rate: float) -> float:
    return INDEX_FORMATS[codec].bits(count, length) / 8 / rate + _nanoseconds(codec, count, length) * 1e-9


def _nanoseconds(codec: int, count: int, length: int) -> float:
    return INDEX_FORMATS[codec].nanoseconds(count, length)

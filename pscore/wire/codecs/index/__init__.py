"""Index codecs by their number in the proto; a test asserts that none is missing."""

from pscore.wire.codecs.index.bitmap import BITMAP
from pscore.wire.codecs.index.format import IndexFormat, Offsets
from pscore.wire.codecs.index.pco import PCODEC
from pscore.wire.codecs.index.raw32 import RAW32
from pscore.wire.codecs.index.rice import RICE
from pscore.wire.codecs.index.streamvbyte import STREAMVBYTE
from pscore.wire.codecs.limits import check_count
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

INDEX_FORMATS: dict[int, IndexFormat] = {
    pb.INDEX_CODEC_RAW32: RAW32,
    pb.INDEX_CODEC_BITMAP: BITMAP,
    pb.INDEX_CODEC_RICE: RICE,
    pb.INDEX_CODEC_PCODEC: PCODEC,
    pb.INDEX_CODEC_STREAMVBYTE: STREAMVBYTE,
}
"""Every index codec but DENSE, which has no bytes."""


def decode_offsets(codec: int, data: bytes, count: int, length: int) -> Offsets:
    """Read ``count`` offsets, which rise strictly and stay below ``length``.

    Raises:
        Refusal: ``UNKNOWN_CODEC``, or ``BAD_CHUNK`` with what is wrong.
    """
    index_format = INDEX_FORMATS.get(codec)
    if index_format is None:
        raise Rejected(ErrorCode.UNKNOWN_CODEC, f"index codec {codec} is not known")
    check_count(count)
    return index_format.decode(data, count, length)

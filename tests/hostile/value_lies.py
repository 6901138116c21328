"""What can be wrong with the values of a chunk: one lie at a time, for each value codec."""

import struct
from collections.abc import Iterator

from pscore.wire.codecs.names import VALUE_CODECS
from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.hostile.corpus_files import Hostile
from tests.hostile.index_lies import GIGABYTES

INF, NAN = float("inf"), float("nan")
COUNT = 3


def lie(codec: str, name: str, says: str, values: bytes, count: int = COUNT, **fields) -> Hostile:
    """Return a chunk in which every element of a span has an entry."""
    parts = {"start": 7, "length": count, "count": count, "index_codec": pb.INDEX_CODEC_DENSE}
    chunk = pb.Chunk(**parts | {"value_codec": VALUE_CODECS[codec], "values": values} | fields)
    reason = ErrorCode.NON_FINITE if "not finite" in says else ErrorCode.BAD_CHUNK
    return Hostile(f"{codec}/{name}", chunk, reason, says)


def everywhere(codec: str, good: bytes) -> Iterator[Hostile]:
    """Lies about the length of good bytes of three values."""
    others = f"3 entries in {codec} need others"
    yield lie(codec, "empty", others, b"")
    yield lie(codec, "truncated", others, good[:-1])
    yield lie(codec, "trailing-byte", others, good + b"\0")
    yield lie(codec, "twice", others, good + good)
    yield lie(codec, "no-entry", "0 entries in a span", good, 0)
    yield lie(codec, "a-count-that-the-bytes-lack", "4096 entries", good, 4096)
    yield lie(codec, "a-count-of-gigabytes", "4294967295 entries in one chunk", good, GIGABYTES)
    yield lie(codec, "the-most-entries-there-may-be", "4194304 entries", good, 1 << 22)
    sparse = {"index_codec": pb.INDEX_CODEC_RAW32, "indices": struct.pack("<3I", 0, 2, 4), "length": 5}
    yield lie(codec, "truncated-beside-good-indices", others, good[:-1], **sparse)


def floats(codec: str, width: int, infinity: bytes, number: bytes) -> Iterator[Hostile]:
    """Three values of ``width`` bytes, with the bytes of infinity, and of a value that is no number."""
    zero = bytes(width)
    negative = infinity[:-1] + bytes([infinity[-1] | 0x80])
    not_finite = f"a {codec} value is not finite"
    yield from everywhere(codec, bytes(COUNT * width))
    yield lie(codec, "infinity", not_finite, infinity + zero + zero)
    yield lie(codec, "minus-infinity", not_finite, zero + zero + negative)
    yield lie(codec, "no-number", not_finite, zero + number + zero)
    yield lie(codec, "no-number-signalling", not_finite, zero + bytes([infinity[0] | 1]) + infinity[1:] + zero)
    yield lie(codec, "a-ragged-value", "need others", bytes(COUNT * width + width // 2))


def bounded(codec: str, codes: bytes, many: int) -> Iterator[Hostile]:
    """Three values with bounds; ``many`` is the bytes of the codes of 513."""

    def wrong(name: str, says: str, low: float, high: float) -> Hostile:
        return lie(codec, name, says, struct.pack("<2f", low, high) + codes)

    not_finite, order = "a bound of magnitudes is not finite", "negative or in the wrong order"
    yield from everywhere(codec, struct.pack("<2f", 0, 1) + codes)
    yield wrong("bounds-in-the-wrong-order", order, 2, 1)
    yield wrong("a-negative-bound", order, -1, 1)
    yield wrong("negative-bounds", order, -2, -1)
    yield wrong("a-bound-of-minus-zero", order, -0.0, 1)
    yield wrong("an-infinite-bound", not_finite, 0, INF)
    yield wrong("a-bound-of-minus-infinity", not_finite, -INF, 1)
    yield wrong("a-bound-that-is-no-number", not_finite, NAN, 1)
    yield wrong("bounds-that-are-no-numbers", not_finite, NAN, NAN)
    yield lie(codec, "no-bounds", "need others", codes)
    second = struct.pack("<4f", 0, 1, 0, INF) + bytes(many)
    yield lie(codec, "an-infinite-bound-of-the-second-block", not_finite, second, 513)
    yield lie(codec, "no-bounds-of-the-second-block", "need others", second[8:], 513)


def sign_mean() -> Iterator[Hostile]:
    def wrong(name: str, says: str, mean: float, signs: int = 0) -> Hostile:
        return lie("sign_mean", name, says, struct.pack("<fB", mean, signs))

    not_finite = "a mean magnitude is not finite"
    yield from everywhere("sign_mean", struct.pack("<fB", 1, 5))
    yield wrong("a-negative-mean", "a mean magnitude is negative", -1)
    yield wrong("a-mean-of-minus-zero", "a mean magnitude is negative", -0.0)
    yield wrong("an-infinite-mean", not_finite, INF)
    yield wrong("a-mean-of-minus-infinity", not_finite, -INF)
    yield wrong("a-mean-that-is-no-number", not_finite, NAN)
    yield wrong("bits-behind-the-last", "bits behind the last value", 1, 8)
    yield lie("sign_mean", "no-mean", "need others", b"\0")
    second = struct.pack("<2f", 1, INF) + bytes(65)
    yield lie("sign_mean", "an-infinite-mean-of-the-second-block", not_finite, second, 513)
    yield lie("sign_mean", "no-mean-of-the-second-block", "need others", second[4:], 513)


def value_lies() -> list[Hostile]:
    """Return all of them."""
    behind = lie("int4", "bits-behind-the-last", "bits behind the last value", struct.pack("<2f2B", 0, 1, 0, 16))
    return [
        *floats("fp32", 4, b"\0\0\x80\x7f", b"\0\0\xc0\x7f"),
        *floats("fp16", 2, b"\0\x7c", b"\0\x7e"),
        *floats("bf16", 2, b"\x80\x7f", b"\xc0\x7f"),
        *bounded("int8", bytes(3), 513),
        *bounded("int4", bytes(2), 257),
        behind,
        *sign_mean(),
    ]

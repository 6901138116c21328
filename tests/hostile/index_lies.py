"""What can be wrong with the indices of a chunk: one lie at a time, for each index codec."""

import struct
from collections.abc import Iterator

from pscore.wire.codecs.names import INDEX_CODECS
from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.hostile.corpus_files import Hostile

GIGABYTES = 2**32 - 1
"""The most that a count can claim."""


def lie(codec: str, name: str, says: str, indices: bytes, count: int = 2, length: int = 10, **fields) -> Hostile:
    """Return a chunk of ones whose values are as they should be."""
    number = INDEX_CODECS.get(codec, pb.INDEX_CODEC_DENSE)
    values = struct.pack("<f", 1) * min(count, 600)
    parts = {"start": 7, "length": length, "count": count, "index_codec": number, "indices": indices}
    parts |= {"value_codec": pb.VALUE_CODEC_FP32, "values": values} | fields
    return Hostile(f"{codec}/{name}", pb.Chunk(**parts), ErrorCode.BAD_CHUNK, says)


def everywhere(codec: str, indices: bytes) -> Iterator[Hostile]:
    """Lies about the numbers beside good bytes of two entries in ten elements."""
    yield lie(codec, "no-entry", "0 entries in a span", b"", 0)
    yield lie(codec, "more-entries-than-elements", "2 entries in a span of 1", indices, 2, 1)
    yield lie(codec, "a-negative-count", "entries in a span of 10", indices, GIGABYTES)
    yield lie(codec, "a-count-of-gigabytes", "4294967295 entries in one chunk", indices, GIGABYTES, 2**40)
    yield lie(codec, "a-negative-length", "lies outside", indices, 2, 2**64 - 1)
    yield lie(codec, "a-start-beyond-any-model", "lies outside", indices, start=2**63)


def dense() -> Iterator[Hostile]:
    yield from everywhere("dense", b"")
    yield lie("dense", "index-bytes", "no index bytes", b"\0", 2, 2)
    yield lie("dense", "the-offsets-as-well", "no index bytes", struct.pack("<2I", 0, 1), 2, 2)
    yield lie("dense", "a-hole", "must hold every element", b"", 2, 3)
    yield lie("dense", "a-span-of-gigabytes", "must hold every element", b"", 2, 2**32)
    yield lie("dense", "a-span-beyond-the-model", "lies outside", b"", 2, 2, start=2**48 - 1)


def raw32() -> Iterator[Hostile]:
    def wrong(name: str, says: str, *offsets: int, cut: int | None = None, **fields) -> Hostile:
        return lie("raw32", name, says, struct.pack(f"<{len(offsets)}I", *offsets)[:cut], **fields)

    yield from everywhere("raw32", struct.pack("<2I", 0, 3))
    yield wrong("empty", "0 index bytes")
    yield wrong("truncated", "7 index bytes", 0, 3, cut=-1)
    yield wrong("trailing-byte", "9 index bytes", 0, 3, 4, cut=-3)
    yield wrong("one-too-few", "4 index bytes", 0)
    yield wrong("one-too-many", "12 index bytes", 0, 3, 4)
    yield wrong("repeated", "unsorted or repeated", 3, 3)
    yield wrong("unsorted", "unsorted or repeated", 3, 0)
    yield wrong("unsorted-at-the-end", "unsorted or repeated", 1, 2, 4, 3, count=4)
    yield wrong("out-of-range", "index 10 lies outside", 3, 10)
    yield wrong("negative", "lies outside", 3, 2**32 - 1)
    yield wrong("negative-first", "unsorted or repeated", 2**32 - 1, 3)
    yield wrong("a-count-that-the-bytes-lack", "for 512 entries", 0, 3, count=512, length=1000)


def bitmap() -> Iterator[Hostile]:
    def wrong(name: str, says: str, *octets: int, **fields) -> Hostile:
        return lie("bitmap", name, says, bytes(octets), **fields)

    yield from everywhere("bitmap", b"\x09\0")
    yield wrong("empty", "0 index bytes")
    yield wrong("truncated", "1 index bytes", 3)
    yield wrong("trailing-byte", "3 index bytes", 3, 0, 0)
    yield wrong("too-few-bits", "has 1 entries", 1, 0)
    yield wrong("too-many-bits", "has 3 entries", 7, 0)
    yield wrong("all-bits", "has 16 entries", 255, 255, length=16)
    yield wrong("a-bit-beyond-the-span", "bits beyond its span", 1, 4)
    yield wrong("a-span-of-gigabytes", "2 index bytes", 3, 0, length=2**40)
    yield wrong("a-span-of-eight-more", "2 index bytes", 3, 0, length=18)


def rice_bytes(b: int, quotients: bytes, low: bytes = b"", escaped: tuple[int, ...] = (), size: int | None = None):
    declared = struct.pack("<IB", len(quotients) if size is None else size, b)
    return declared + quotients + low + struct.pack(f"<{len(escaped)}I", *escaped)


def rice() -> Iterator[Hostile]:
    def wrong(name: str, says: str, data: bytes, *, length: int = 100, **fields) -> Hostile:
        return lie("rice", name, says, data, length=length, **fields)

    def of(name: str, says: str, b: int, *quotients: int, length: int = 100, count: int = 2, **parts) -> Hostile:
        return wrong(name, says, rice_bytes(b, bytes(quotients), **parts), length=length, count=count)

    escape = (1, 0, 2)  # quotients 0 and 16
    yield from everywhere("rice", rice_bytes(0, b"\x03"))
    yield wrong("empty", "0 index bytes", b"")
    yield wrong("no-parameter", "4 index bytes", bytes(4))
    yield wrong("half-a-header", "3 index bytes", bytes(3))
    yield wrong("blocks-that-are-not-there", "for 2 blocks", b"\0\0\0\0\0", count=513, length=600)
    yield of("quotients-longer-than-the-bytes", "2 bytes of quotients declared", 0, 3, size=2)
    yield of("quotients-of-gigabytes", "4294967295 bytes of quotients declared", 0, 3, size=GIGABYTES)
    yield of("quotients-shorter-than-they-are", "0 quotients in 0 bytes", 0, 3, size=0)
    yield of("a-parameter-of-28", "a Rice parameter above 27", 28, 3, low=bytes(7))
    yield of("a-parameter-of-64", "a Rice parameter above 27", 64, 3, low=bytes(16))
    yield of("a-parameter-of-255", "a Rice parameter above 27", 255, 3, low=bytes(64))
    yield of("a-quotient-too-few", "1 quotients in 1 bytes", 0, 1)
    yield of("a-quotient-too-many", "3 quotients in 1 bytes", 0, 7)
    yield of("an-empty-byte-of-quotients", "2 quotients in 2 bytes", 0, 3, 0)
    yield of("a-quotient-of-17", "a quotient above 16", 0, 1, 0, 4)
    yield of("zeros-without-end", "a quotient above 16", 0, 1, *bytes(300), 1)
    yield of("zeros-before-the-first", "a quotient above 16", 0, *bytes(3), 3)
    yield of("no-low-bits", "0 bytes for 6 low bits", 3, 3)
    yield of("a-byte-of-low-bits-too-many", "2 bytes for 6 low bits", 3, 3, low=bytes(2))
    yield of("bits-behind-the-last-low-bits", "bits behind the last entry", 3, 3, low=b"\x40")
    yield of("an-escape-without-its-gap", "1 escaped gaps", 0, *escape)
    yield of("half-an-escaped-gap", "2 bytes for 0 low bits and 1 escaped", 0, *escape, low=b"\x40\0")
    yield of("a-gap-without-its-escape", "4 bytes for 0 low bits and 0 escaped", 0, 3, escaped=(40,))
    yield of("trailing-bytes", "8 bytes for 0 low bits and 1 escaped", 0, *escape, escaped=(16, 16))
    yield of("an-escape-that-is-none", "short enough not to be escaped", 0, *escape, escaped=(15,))
    yield of("an-escape-that-is-none-for-its-parameter", "short enough", 5, *escape, low=b"\0", escaped=(500,))
    yield of("out-of-range", "index 100 lies outside", 0, *escape, escaped=(99,), length=100)
    yield of("out-of-range-without-escape", "index 4 lies outside", 0, 0x11, length=4)
    yield of("a-gap-of-gigabytes", "lies outside", 0, *escape, escaped=(GIGABYTES,))
    yield of("far-out-of-range", "lies outside", 27, 1, 0x80, 0x40, low=bytes([255] * 10 + [1]), count=3)
    yield wrong("all-ones", "bytes of quotients declared", b"\xff" * 64)


def runs() -> Iterator[Hostile]:
    def of(
        name: str, says: str, runs: int, starts: bytes, ends: bytes, *, size: int | None = None, **fields
    ) -> Hostile:
        header = struct.pack("<2I", runs, len(starts) if size is None else size)
        return lie("runs", name, says, header + starts + ends, **{"count": 4, "length": 100} | fields)

    near, far = rice_bytes(0, b"\x05"), rice_bytes(0, b"\x21")  # offsets 0 and 2; 0 and 5
    two, three = rice_bytes(0, b"\x0a"), rice_bytes(0, b"\x0c")  # offsets 1 and 3; 2 and 3
    yield from everywhere("runs", struct.pack("<2I", 1, 6) + rice_bytes(0, b"\x01") + rice_bytes(0, b"\x02"))
    yield lie("runs", "empty", "0 index bytes for the sizes", b"")
    yield lie("runs", "half-a-header", "7 index bytes for the sizes", bytes(7))
    yield of("no-run", "runs of 0 entries", 0, bytes(4), bytes(4))
    yield of("more-runs-than-entries", "5 runs of 4 entries", 5, far, two)
    yield of("runs-of-gigabytes", "4294967295 runs of 4", GIGABYTES, far, two)
    yield of("starts-longer-than-the-bytes", "13 bytes of places of runs declared, 12", 2, far, two, size=13)
    yield of("starts-of-gigabytes", "4294967295 bytes of places", 2, far, two, size=GIGABYTES)
    yield of("starts-cut", "1 bytes of quotients declared, 0 are there", 2, far, two, size=5)
    yield of("no-ends", "0 index bytes for 1 blocks", 2, far, b"")
    yield of("a-start-too-few", "1 quotients in 1 bytes for 2", 2, rice_bytes(0, b"\x01"), two)
    yield of("an-end-too-many", "3 quotients in 1 bytes for 2", 2, far, rice_bytes(0, b"\x0b"))
    yield of("fewer-entries-than-the-chunk-says", "runs of 4 entries, the chunk says 5", 2, far, two, count=5)
    yield of("more-entries-than-the-chunk-says", "runs of 4 entries, the chunk says 3", 2, far, two, count=3)
    yield of("ends-of-gigabytes", "the chunk says 4", 2, far, rice_bytes(0, b"\x01\0\x02", escaped=(GIGABYTES,)))
    yield of("overlapping", "runs overlap", 2, near, three)
    yield of("out-of-range", "index 6 lies outside", 2, far, two, length=6)
    yield of("a-start-of-gigabytes", "lies outside", 2, rice_bytes(0, b"\x01\0\x02", escaped=(GIGABYTES,)), two)
    yield of("trailing-bytes", "bytes for 0 low bits", 2, far, two + b"\0")


def index_lies() -> list[Hostile]:
    """Return all of them."""
    return [each for codec in (dense, raw32, bitmap, rice, runs) for each in codec()]

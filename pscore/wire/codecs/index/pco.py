"""Gaps as a standalone file of the pcodec library (https://github.com/pcodec/pcodec): fewest bytes, slow to encode.

The library's own reader of such files is fast and memory-safe, but it ignores what follows the end of a file, allocates
windows of up to 2^24 numbers as a file's delta encoding asks for, and does so again for each of as many chunks as a
file claims: a few dozen bytes for a millisecond and more each. So the file is walked here, and the library reads the
chunks, one at a time, whose headers say that they are of the kind that is written here.
"""

import math
from typing import Any

import numpy as np

from pscore.wire.codecs.index.format import Gaps, IndexFormat, Offsets, gaps_of, offsets_of
from pscore.wire.errors import ErrorCode, Rejected

_FILE_BYTES = 60
"""What a file of few numbers needs beside them: its header and the bins of the histogram."""

_MAGIC = b"pco!"
_STANDALONE_VERSION = 3
_END, _UINT32 = 0, 1  # types of numbers; a chunk of type 0 ends the file
_PLAIN = 0  # first byte of a chunk's description: mode classic in one half, no delta encoding in the other
_HINT_WIDTH_BITS = 6  # how many bits the count has, less one; then come those bits
_CHUNK_HEADER_BYTES = 5  # type, count less one in 3 bytes, and the first byte of the description

_CHUNK_ENTRIES = 1 << 16
"""A file may have one chunk, and one more for every so many entries; the library fills 2^17 at least."""


def _encode(offsets: Offsets, length: int) -> bytes:
    from pcodec import ChunkConfig, DeltaSpec, ModeSpec, standalone

    # Gaps of a support have no trend and no common factor: looking for either costs time and finds nothing.
    config = ChunkConfig(mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op())
    return bytes(standalone.simple_compress(gaps_of(offsets), config))


def _decode(data: bytes, count: int, length: int) -> Offsets:
    from pcodec.wrapped import FileDecompressor

    body = data[_header_bytes(data, count) :]
    gaps = np.empty(count, np.uint32)
    try:
        reader, used = FileDecompressor.new(body)
        rest, done = body[used:], 0
        for _ in range(1 + count // _CHUNK_ENTRIES):
            if done == count:
                break
            rest, done = _read_chunk(reader, rest, gaps, done)
    except (RuntimeError, TypeError) as error:
        raise Rejected(ErrorCode.BAD_CHUNK, f"index bytes are no pcodec file of uint32: {error}") from error
    if done < count:
        raise Rejected(ErrorCode.BAD_CHUNK, f"a pcodec file of {count} entries in chunks of too few")
    if rest != bytes([_END]):
        raise Rejected(ErrorCode.BAD_CHUNK, "a pcodec file does not end after its last entry")
    return offsets_of(gaps, length)


def _header_bytes(data: bytes, count: int) -> int:
    """Return the bytes of the standalone header, which must state ``count`` numbers of any type."""
    start = len(_MAGIC) + 2
    if data[:start] != _MAGIC + bytes([_STANDALONE_VERSION, _END]):
        raise Rejected(
            ErrorCode.BAD_CHUNK, f"index bytes are no standalone pcodec file of version {_STANDALONE_VERSION}"
        )
    stated = int.from_bytes(data[start : start + 9], "little")
    width = (stated & (1 << _HINT_WIDTH_BITS) - 1) + 1
    size = -(-(_HINT_WIDTH_BITS + width) // 8)
    if (stated & (1 << 8 * size) - 1) >> _HINT_WIDTH_BITS != count:
        raise Rejected(ErrorCode.BAD_CHUNK, f"a pcodec file that does not state {count} entries")
    return start + size


def _read_chunk(reader: Any, rest: bytes, gaps: Gaps, done: int) -> tuple[bytes, int]:
    """Read a chunk into ``gaps``, of which ``done`` are filled; return what follows it and how many are then."""
    if len(rest) < _CHUNK_HEADER_BYTES or rest[0] != _UINT32:
        raise Rejected(ErrorCode.BAD_CHUNK, f"a pcodec file has no chunk of uint32 for its entries from {done}")
    entries = int.from_bytes(rest[1:4], "little") + 1
    if entries > gaps.size - done:
        raise Rejected(ErrorCode.BAD_CHUNK, f"a pcodec file has more than {gaps.size} entries")
    if rest[4] != _PLAIN:
        raise Rejected(ErrorCode.BAD_CHUNK, "a pcodec chunk has another mode than classic, or a delta encoding")
    rest = rest[_CHUNK_HEADER_BYTES - 1 :]
    chunk, used = reader.chunk_decompressor(rest, "u32")
    rest = rest[used:]
    progress, used = chunk.read_page_into(rest, entries, gaps[done : done + entries])
    if progress.n_processed != entries or not progress.finished:
        raise Rejected(ErrorCode.BAD_CHUNK, f"a pcodec chunk has not exactly {entries} entries")
    return rest[used:], done + entries


def _bits(count: int, length: int) -> float:
    density = count / length
    entropy = 0.0
    if density < 1:
        entropy = -(density * math.log2(density) + (1 - density) * math.log2(1 - density)) / density
    return 1.0035 * entropy * count + 8 * _FILE_BYTES


PCODEC = IndexFormat("pcodec", _encode, _decode, _bits, nanoseconds=lambda count, length: 2e4 + 24.0 * count)

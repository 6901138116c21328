"""Segments to messages and back: the one place where an update becomes bytes."""

import zlib
from collections.abc import Iterator

import numpy as np
import torch
from google.protobuf.message import Message

from pscore import codecs
from pscore.layout import Span
from pscore.reasons import Reason, Refusal
from pscore.segment import Segment
from pscore.v1 import parameter_server_pb2 as pb

DEFAULT_CHUNK_BYTES = 1 << 20
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 64 << 10, 2 << 20
FRAMING_BYTES = 5
"""gRPC's own prefix of each message; counted with the message wherever this project counts bytes."""

_WORST_ENTRY_BYTES = 8  # the index codec is the smallest one, so never above RAW32's 4, plus 4 of fp32
_MAX_CHUNK_SPAN = 1 << 32  # offsets in a chunk are uint32


class Checksum:
    """Counts what passes: chunks, entries, and a CRC-32 over index and value bytes."""

    def __init__(self) -> None:
        """Start at nothing."""
        self.chunks = 0
        self.entries = 0
        self.crc32 = 0

    def add(self, chunk: pb.Chunk) -> None:
        """Count one chunk."""
        self.chunks += 1
        self.entries += chunk.count
        self.crc32 = zlib.crc32(chunk.values, zlib.crc32(chunk.indices, self.crc32))

    def commit(self) -> pb.Commit:
        """Return the message that ends the stream."""
        return pb.Commit(chunks=self.chunks, entries=self.entries, crc32=self.crc32)

    def verify(self, commit: pb.Commit) -> None:
        """Compare with the sender's own count.

        Raises:
            Refusal: ``BAD_COMMIT``, naming what differs.
        """
        for what, ours, theirs in (
            ("chunks", self.chunks, commit.chunks),
            ("entries", self.entries, commit.entries),
            ("crc32", self.crc32, commit.crc32),
        ):
            if ours != theirs:
                raise Refusal(Reason.BAD_COMMIT, f"the commit says {what} = {theirs}, received were {ours}")


def encode(segment: Segment, *, chunk_bytes: int, group: int = 0) -> Iterator[pb.Chunk]:
    """Cut a segment into chunks of at most ``chunk_bytes`` of payload, values in the dtype that they have."""
    if segment.offsets is None:
        step = max(1, chunk_bytes // segment.values.dtype.itemsize)
        for first in range(0, segment.entries, step):
            value_codec, values = codecs.encode_values(segment.values[first : first + step])
            count = min(step, segment.entries - first)
            yield pb.Chunk(
                group=group,
                start=segment.span.start + first,
                length=count,
                count=count,
                index_codec=pb.INDEX_CODEC_DENSE,
                value_codec=value_codec,
                values=values,
            )
        return
    offsets = segment.offsets.cpu().numpy()
    host_values = segment.values.detach().cpu()
    step = max(1, chunk_bytes // _WORST_ENTRY_BYTES)
    first = 0
    while first < offsets.size:
        piece = offsets[first : first + step]
        low = int(piece[0])
        if int(piece[-1]) - low >= _MAX_CHUNK_SPAN:
            piece = piece[: int(piece.searchsorted(low + _MAX_CHUNK_SPAN))]
        index_codec, indices = codecs.encode_offsets(piece - low)
        value_codec, values = codecs.encode_values(host_values[first : first + piece.size])
        yield pb.Chunk(
            group=group,
            start=segment.span.start + low,
            length=int(piece[-1]) - low + 1,
            count=piece.size,
            index_codec=index_codec,
            value_codec=value_codec,
            indices=indices,
            values=values,
        )
        first += piece.size


def decode(chunk: pb.Chunk, within: Span) -> Segment:
    """Read one chunk, which must lie inside ``within``; values come out as fp32 on the host.

    Raises:
        Refusal: ``BAD_CHUNK``, ``UNKNOWN_CODEC`` or ``NON_FINITE``; nothing is allocated from an unchecked length.
    """
    span = Span(chunk.start, chunk.start + chunk.length)
    if not (within.start <= span.start and span.end <= within.end):
        raise Refusal(
            Reason.BAD_CHUNK,
            f"chunk [{span.start}, {span.end}) lies outside [{within.start}, {within.end})",
        )
    if not 0 < chunk.count <= chunk.length:
        raise Refusal(Reason.BAD_CHUNK, f"{chunk.count} entries in a span of {chunk.length} elements")
    values = codecs.decode_values(chunk.value_codec, chunk.values, chunk.count)
    if not np.isfinite(values.numpy()).all():
        raise Refusal(Reason.NON_FINITE, f"non-finite value in [{span.start}, {span.end})")
    if chunk.index_codec == pb.INDEX_CODEC_DENSE:
        if chunk.count != chunk.length or chunk.indices:
            raise Refusal(Reason.BAD_CHUNK, "a dense chunk must hold every element of its span and no index bytes")
        return Segment(span, None, values)
    offsets = codecs.decode_offsets(chunk.index_codec, chunk.indices, chunk.count, chunk.length)
    return Segment(span, torch.from_numpy(offsets), values)


class ChunkReader:
    """Decodes the chunks of one ascending sequence and checks their order.

    Args:
        within: where the chunks must lie.
        checksum: counts what is read, for the commit; shared where a stream holds several sequences.
    """

    def __init__(self, within: Span, checksum: Checksum | None = None) -> None:
        """Expect the first chunk."""
        self.within = within
        self.checksum = checksum or Checksum()
        self.segments: list[Segment] = []
        self._next_start = within.start

    def read(self, chunk: pb.Chunk) -> Segment:
        """Take the next chunk; raises :class:`Refusal` as :func:`decode` does, and where it goes backwards."""
        if chunk.start < self._next_start:
            raise Refusal(
                Reason.BAD_CHUNK, f"chunk at {chunk.start} overlaps or precedes what came before {self._next_start}"
            )
        segment = decode(chunk, self.within)
        self.checksum.add(chunk)
        self._next_start = segment.span.end
        self.segments.append(segment)
        return segment

    def require_complete(self) -> None:
        """Check that dense chunks have covered everything; raises :class:`Refusal` (``BAD_COMMIT``) if not."""
        if self.checksum.entries != self.within.length:
            raise Refusal(Reason.BAD_COMMIT, f"{self.checksum.entries} of {self.within.length} elements were sent")


def encode_bytes(data: bytes, chunk_bytes: int) -> Iterator[pb.BytesChunk]:
    """Cut a byte string into messages."""
    for offset in range(0, len(data), chunk_bytes):
        yield pb.BytesChunk(offset=offset, data=data[offset : offset + chunk_bytes])


class BytesReader:
    """Joins the pieces of a byte string of declared length, which must come in order."""

    def __init__(self, length: int, expected: int) -> None:
        """Refuse at once a declared length other than the expected one."""
        if length != expected:
            raise Refusal(Reason.BAD_REQUEST, f"{length} bytes of buffers declared, the model has {expected}")
        self._length = length
        self._data = bytearray()

    def read(self, piece: pb.BytesChunk) -> None:
        """Take the next piece; raises :class:`Refusal` if it is not the next or goes beyond the length."""
        if piece.offset != len(self._data) or not piece.data or len(self._data) + len(piece.data) > self._length:
            raise Refusal(
                Reason.BAD_CHUNK, f"{len(piece.data)} bytes at {piece.offset}, expected the rest from {len(self._data)}"
            )
        self._data += piece.data

    @property
    def complete(self) -> bool:
        """True once every byte has come."""
        return len(self._data) == self._length

    def finish(self) -> bytes:
        """Return the bytes; raises :class:`Refusal` (``BAD_COMMIT``) if some are missing."""
        if not self.complete:
            raise Refusal(Reason.BAD_COMMIT, f"{len(self._data)} of {self._length} bytes of buffers were sent")
        return bytes(self._data)


def wire_bytes(message: Message) -> int:
    """Bytes of one message on the wire as gRPC frames it (HTTP/2 and TCP headers not counted)."""
    return message.ByteSize() + FRAMING_BYTES

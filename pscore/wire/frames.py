"""Segments to messages and back; an update becomes bytes nowhere else."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from google.protobuf.message import Message
from isal.isal_zlib import crc32

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.codecs import residue
from pscore.wire.codecs.format import MAX_ENTRIES, Offsets, ValueFormat, check_count
from pscore.wire.codecs.index import INDEX_FORMATS, choose, decode_offsets
from pscore.wire.codecs.runs import count_runs
from pscore.wire.codecs.values import CODEC_OF_DTYPE, decode_values, format_of, host_values
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

DEFAULT_CHUNK_BYTES = 1 << 20
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 64 << 10, 2 << 20
FRAMING_BYTES = 5
"""gRPC's own prefix of each message; every count of bytes includes it."""

_RAW_INDEX_BYTES = 4  # what RAW32 needs for an entry; a codec that the cost model chooses hardly ever needs more
_MAX_CHUNK_SPAN = 1 << 32  # offsets in a chunk are uint32


Own = Callable[[Span, Offsets | None], torch.Tensor]
"""Returns a receiver's values at offsets of a span, or at every element: fp16, bf16 or 16-bit words, on the host."""


class Checksum:
    """Counts chunks, their entries, and a CRC-32 over index and value bytes."""

    def __init__(self) -> None:
        self.chunks = self.entries = self.crc32 = 0

    def add(self, chunk: pb.Chunk, *values: memoryview) -> None:
        """Count one chunk, whose value bytes are ``values``, end to end, or else its own."""
        self.chunks += 1
        self.entries += chunk.count
        for part in (chunk.indices, chunk.values, *values):
            self.crc32 = crc32(part, self.crc32)

    def commit(self) -> pb.Commit:
        """Return the message that ends the stream."""
        return pb.Commit(chunks=self.chunks, entries=self.entries, crc32=self.crc32)

    def verify(self, commit: pb.Commit) -> None:
        """Compare with the sender's own count; raises :class:`Rejected` (``BAD_COMMIT``), naming what differs."""
        for what in ("chunks", "entries", "crc32"):
            ours, theirs = getattr(self, what), getattr(commit, what)
            if ours != theirs:
                raise Rejected(ErrorCode.BAD_COMMIT, f"the commit says {what} = {theirs}, received were {ours}")


@dataclass(frozen=True, slots=True)
class WireForm:
    """How a segment is written.

    Attributes:
        value: value codec, by its number in the proto; ``None`` for the one that writes the values' dtype exactly.
        index: index codec; ``None`` to choose one of the ``allowed`` for each chunk, by the rate of the link.
    """

    value: int | None = None
    index: int | None = None
    allowed: Collection[int] = tuple(INDEX_FORMATS)
    link_bytes_per_second: float | None = None


class Encoded(NamedTuple):
    """A chunk, and the fp32 values ``[count]`` that its receiver will decode, bit for bit.

    The difference between the values and ``decoded`` belongs back in the sender's residual.
    """

    chunk: pb.Chunk
    decoded: torch.Tensor


def encode(segment: SparseSlice, form: WireForm = WireForm(), *, chunk_bytes: int, group: int = 0) -> Iterator[Encoded]:
    """Cut a segment into chunks of at most ``chunk_bytes`` (at least 64) of payload, and of one entry at least.

    The values are fp32, fp16 or bf16 on any device, finite if the value codec is not exact. ``group`` is the number
    of the chunks' group in the header's plan.

    Raises:
        Rejected: ``NON_FINITE``, by a lossy codec with bounds; the receiver would refuse the others' bytes.
    """
    values = host_values(segment.values)
    for chunk, first in chunks_without_values(segment, form, chunk_bytes, group):
        chunk.values, decoded = format_of(chunk.value_codec).encode(values[first : first + chunk.count])
        yield Encoded(chunk, torch.from_numpy(decoded))


def chunks_without_values(
    segment: SparseSlice, form: WireForm, chunk_bytes: int, group: int = 0
) -> Iterator[tuple[pb.Chunk, int]]:
    """Cut a segment as :func:`encode` does; yield each chunk without value bytes, and the place of its first entry."""
    value = form.value if form.value is not None else CODEC_OF_DTYPE[segment.values.dtype]
    start = segment.span.start
    if segment.offsets is None:
        step = _entries_within(chunk_bytes, format_of(value), 0)
        for first in range(0, segment.entries, step):
            count = min(step, segment.entries - first)
            yield _chunk(group, Span(start + first, start + first + count), value, count), first
        return
    offsets = segment.offsets.cpu().numpy()
    step = _entries_within(chunk_bytes, format_of(value), _RAW_INDEX_BYTES)
    first = 0
    while first < offsets.size:
        positions = offsets[first : first + step]
        base, last = int(positions[0]), int(positions[-1])
        if last - base >= _MAX_CHUNK_SPAN:
            positions = positions[: int(positions.searchsorted(base + _MAX_CHUNK_SPAN))]
        while True:
            span = Span(start + base, start + int(positions[-1]) + 1)
            index = form.index
            if index is None:
                runs = count_runs(positions)
                index = choose(positions.size, span.length, form.link_bytes_per_second, form.allowed, runs)
            indices = INDEX_FORMATS[index].encode(positions, span.length, base)
            if positions.size == 1 or len(indices) + format_of(value).size(positions.size) <= chunk_bytes:
                break
            positions = positions[: positions.size // 2]  # a codec that suits these offsets badly
        yield _chunk(group, span, value, positions.size, index, indices), first
        first += positions.size


def _entries_within(chunk_bytes: int, value_format: ValueFormat, index_bytes: int) -> int:
    """Return how many entries fit with indices of so many bytes each: whole blocks if one does."""
    block = value_format.block
    block_bytes = value_format.size(block) + index_bytes * block
    if block_bytes <= chunk_bytes:
        return min(chunk_bytes // block_bytes * block, MAX_ENTRIES)
    return max(1, 8 * (chunk_bytes - value_format.bound_bytes) // (value_format.bits + 8 * index_bytes))


def _chunk(
    group: int, span: Span, value: int, count: int, index: int = pb.INDEX_CODEC_DENSE, indices: bytes = b""
) -> pb.Chunk:
    return pb.Chunk(
        group=group,
        start=span.start,
        length=span.length,
        count=count,
        index_codec=cast("pb.IndexCodec.ValueType", index),
        value_codec=cast("pb.ValueCodec.ValueType", value),
        indices=indices,
    )


def decode(
    chunk: pb.Chunk,
    within: Span,
    values: memoryview | None = None,
    *,
    origin: int | None = None,
    own: Own | None = None,
    dtype: torch.dtype = torch.float32,
) -> SparseSlice:
    """Read one chunk, which must lie inside ``within``, to fp32 values on the host, or words of a feed's ``dtype``.

    ``values`` are the value bytes of a chunk that has none itself. The offsets of a sparse one count from ``origin``,
    if that is given, so that the slice's span begins there. Residues are completed from the receiver's ``own`` values.

    Raises:
        Rejected: ``BAD_CHUNK``, ``UNKNOWN_CODEC`` or ``NON_FINITE``; nothing is allocated from an unchecked length.
    """
    start, length, count = chunk.start, chunk.length, chunk.count
    end = start + length
    if not (within.start <= start and end <= within.end):
        outside = f"chunk [{start}, {end}) lies outside [{within.start}, {within.end})"
        raise Rejected(ErrorCode.BAD_CHUNK, outside)
    if not 0 < count <= length:
        raise Rejected(ErrorCode.BAD_CHUNK, f"{count} entries in a span of {length} elements")
    index, indices = chunk.index_codec, chunk.indices
    data = cast(bytes, values) if values else chunk.values  # a codec reads any buffer
    is_residues = own is not None and chunk.value_codec == pb.VALUE_CODEC_RESIDUE
    decoded = None if is_residues else torch.from_numpy(decode_values(chunk.value_codec, data, count, dtype))
    offsets: Offsets | None = None
    if index == pb.INDEX_CODEC_DENSE:
        if count != length or indices:
            raise Rejected(ErrorCode.BAD_CHUNK, "a dense chunk must hold every element of its span and no index bytes")
        span = Span(start, end)
    else:
        span = Span(start if origin is None else origin, end)
        offsets = decode_offsets(index, indices, count, length, start - span.start)
    if decoded is None:
        assert own is not None
        check_count(count)
        mine = own(span, offsets)
        words = residue.decode(data, mine.view(torch.uint16).numpy())
        decoded = torch.from_numpy(words).view(mine.dtype).to(dtype)
        if dtype == torch.float32 and not bool(decoded.isfinite().all()):
            raise Rejected(ErrorCode.NON_FINITE, "a value of residues is not finite")
    return SparseSlice(span, None if offsets is None else torch.from_numpy(offsets), decoded)


class ChunkReader:
    """Decodes the chunks of one ascending sequence ``within`` a span, and checks their order.

    ``checksum`` counts for the commit; a stream of several sequences has one. ``position`` is the index behind the
    ``segments`` read so far; ``origin``, ``own`` and ``dtype`` are as for :func:`decode`.
    """

    def __init__(
        self,
        within: Span,
        checksum: Checksum | None = None,
        origin: int | None = None,
        own: Own | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.within = within
        self.checksum = checksum or Checksum()
        self.segments: list[SparseSlice] = []
        self.position = within.start
        self._origin, self._own, self._dtype = origin, own, dtype

    def read(self, chunk: pb.Chunk, *values: memoryview) -> SparseSlice:
        """Decode the next chunk, whose value bytes are ``values`` or its own.

        Raises :class:`Rejected` as :func:`decode` does, and if it goes backwards.
        """
        if chunk.start < self.position:
            order = f"chunk at {chunk.start} overlaps or precedes what came before {self.position}"
            raise Rejected(ErrorCode.BAD_CHUNK, order)
        segment = decode(chunk, self.within, *values, origin=self._origin, own=self._own, dtype=self._dtype)
        self.checksum.add(chunk, *values)
        self.position = segment.span.end
        self.segments.append(segment)
        return segment


def encode_bytes(data: bytes, chunk_bytes: int) -> Iterator[pb.BytesChunk]:
    """Cut a byte string into messages."""
    for offset in range(0, len(data), chunk_bytes):
        yield pb.BytesChunk(offset=offset, data=data[offset : offset + chunk_bytes])


class BytesReader:
    """Joins the pieces of a byte string in order; refuses at once a declared length other than the expected one."""

    def __init__(self, length: int, expected: int) -> None:
        if length != expected:
            raise Rejected(ErrorCode.BAD_REQUEST, f"{length} bytes of buffers declared, the model has {expected}")
        self._length = length
        self._data = bytearray()

    def read(self, piece: pb.BytesChunk) -> None:
        """Append a piece; raises :class:`Rejected` if it is not the next or goes beyond the length."""
        if piece.offset != len(self._data) or not piece.data or len(self._data) + len(piece.data) > self._length:
            found = f"{len(piece.data)} bytes at {piece.offset}, expected the rest from {len(self._data)}"
            raise Rejected(ErrorCode.BAD_CHUNK, found)
        self._data += piece.data

    @property
    def received(self) -> int:
        """Bytes so far."""
        return len(self._data)

    @property
    def complete(self) -> bool:
        """True once every byte is there."""
        return len(self._data) == self._length

    def finish(self) -> bytes:
        """Return the bytes; raises :class:`Rejected` (``BAD_COMMIT``) if some are missing."""
        if not self.complete:
            raise Rejected(ErrorCode.BAD_COMMIT, f"{len(self._data)} of {self._length} bytes of buffers were sent")
        return bytes(self._data)


def wire_bytes(message: Message) -> int:
    """Return the bytes of one message as gRPC frames it, without HTTP/2 and TCP headers."""
    return message.ByteSize() + FRAMING_BYTES

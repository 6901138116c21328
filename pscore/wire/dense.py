"""Whole models in messages: written with one copy of their values, and read with one, to where the values belong.

The protobuf library copies the bytes of a field several times on each side. So the value bytes of a chunk, its last
field, stay outside: the sender appends them to what the library has written, the receiver reads the rest of the message
by the library and the values from the message as it came.
"""

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from google.protobuf.message import Message
from numpy.typing import NDArray

from pscore.model.layout import Span
from pscore.wire.codecs.format import MAX_ENTRIES
from pscore.wire.codecs.values import CODEC_OF_DTYPE, decode_values
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.frames import Checksum
from pscore.wire.v1 import parameter_server_pb2 as pb

_CHUNK_TAG = bytes([pb.UploadModelRequest.CHUNK_FIELD_NUMBER << 3 | 2])  # the same in every stream
_VALUES_TAG = bytes([pb.Chunk.VALUES_FIELD_NUMBER << 3 | 2])
_SMALL_BYTES = 4 << 10  # of a message, from which the library's copies cost more than finding the values
_BLOCK = 64 << 10  # values that are copied, then checked
_MOST_FIELDS = 8  # of a message, that are searched for values
_MESSAGE_SECONDS = 0.1  # that a message of a whole model may take
_SENT_BEFORE = 16  # times a larger message's bytes
_MOST_BYTES = (4 << 20) - (64 << 10)  # of a message; gRPC's own limit is 4 MiB


def field_bytes(number: int, message: Message) -> bytes:
    """Serialise a message as a field of another, whose bytes are those of its fields one after another."""
    data = message.SerializeToString()
    return bytes((number << 3 | 2,)) + _varint(len(data)) + data


def chunk_field(chunk: pb.Chunk, *values: memoryview) -> list[bytes | memoryview]:
    """Serialise a chunk as the field of a stream's message, in parts end to end; the value bytes are not copied.

    These are ``values``, end to end, or those of the chunk itself.
    """
    inner, size = chunk.SerializeToString(), sum(part.nbytes for part in values)
    if size:
        inner += _VALUES_TAG + _varint(size)
    return [_CHUNK_TAG + _varint(len(inner) + size) + inner, *values]


def chunk_message(chunk: pb.Chunk, *values: memoryview) -> bytes:
    """Serialise a stream's message that has a chunk, as :func:`chunk_field`, and nothing else."""
    return b"".join(chunk_field(chunk, *values))


def message_bytes(link_bytes_per_second: float | None, seconds: float) -> int:
    """Return how many bytes a message may have that takes so long on a link: up to 4 MiB; 0 on an unknown link."""
    return min(_MOST_BYTES, int(seconds * (link_bytes_per_second or 0)))


class MessageSize:
    """How large the messages of a stream of values may be: at first ``nbytes``, then as the link proves to be fast.

    The first messages go into buffers, however slow the link is, and prove nothing.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = self._least = nbytes
        self._sent, self._began = 0, time.monotonic()

    def sent(self, nbytes: int) -> None:
        """Count a message that is on its way."""
        self._sent += nbytes
        rate = self._sent / max(time.monotonic() - self._began, 1e-6)
        self.nbytes = max(self._least, min(message_bytes(rate, _MESSAGE_SECONDS), self._sent // _SENT_BEFORE))


def split_values(raw: bytes, *, several: bool) -> tuple[bytes, list[memoryview]]:
    """Return a stream's serialised message without the value bytes of its chunks, and these, not copied.

    The list has those of the first chunks in order, or is empty. The bytes of a chunk stay in the message, and are
    empty in the list, if they are few, or not the chunk's last field. ``several`` tells whether a message may have
    other fields than a chunk; otherwise nothing is taken out of one that has others.
    """
    if len(raw) < _SMALL_BYTES:
        return raw, []
    parts: list[bytes] = []
    values: list[memoryview] = []
    tag = done = 0
    for number, start, end in islice(fields(raw), _MOST_FIELDS if several else 1):
        if number == pb.UploadModelRequest.CHUNK_FIELD_NUMBER:
            if raw[tag:start] != _CHUNK_TAG + _varint(end - start) or not (several or end == len(raw)):
                return raw, []
            last, first = _find_values(raw, start, end)
            if last < end:
                parts += [raw[done:tag], _CHUNK_TAG + _varint(last - start), raw[start:last]]
                done = end
            values.append(memoryview(raw)[first:end])
        tag = end
    if not parts:
        return raw, []
    return b"".join((*parts, raw[done:])), values


def _find_values(raw: bytes, position: int, end: int) -> tuple[int, int]:
    """Return where the field with the values of a chunk begins, and these, if it is the last one and large; or ends."""
    begin = position
    while position < end and position - begin < _SMALL_BYTES:
        number, start, behind = next(fields(raw, position, end), (0, 0, end))
        if number == pb.Chunk.VALUES_FIELD_NUMBER:
            is_last = behind == end and raw[position:start] == _VALUES_TAG + _varint(end - start)
            return (position, start) if is_last and end - start >= _SMALL_BYTES else (end, end)
        position = behind
    return end, end


def cut(span: Span, elements: int) -> Iterator[Span]:
    """Cut a span into parts of so many elements."""
    for start in range(span.start, span.end, elements):
        yield Span(start, min(span.end, start + elements))


def dense_chunk(span: Span, dtype: torch.dtype, group: int = 0) -> pb.Chunk:
    """Return the chunk, without value bytes, of all elements of a span, at most ``MAX_ENTRIES``, in one dtype."""
    return pb.Chunk(
        group=group,
        start=span.start,
        length=span.length,
        count=span.length,
        index_codec=pb.INDEX_CODEC_DENSE,
        value_codec=cast("pb.ValueCodec.ValueType", CODEC_OF_DTYPE[dtype]),
    )


def bytes_of(values: torch.Tensor) -> memoryview:
    """Return the bytes of values or words; without a copy if they are contiguous and on the host."""
    return values.detach().cpu().contiguous().view(torch.uint8).numpy().data


class DenseReader:
    """Reads dense chunks, which cover a span without gaps, into ``values``, ``[span.length]`` on the host.

    They are fp32, or words of ``dtype``.

    The system allocates the memory as it is written.
    """

    def __init__(self, span: Span, dtype: torch.dtype = torch.float32) -> None:
        self.span, self.checksum = span, Checksum()
        self.values = torch.empty(span.length, dtype=dtype, device="cpu")

    def read(self, chunk: pb.Chunk, *values: memoryview) -> None:
        """Read the next chunk, whose value bytes are ``values`` or its own.

        Raises :class:`Rejected` (``BAD_CHUNK``, ``UNKNOWN_CODEC``, ``NON_FINITE``); the chunk then does not count.
        """
        first, count = self.checksum.entries, chunk.count
        start = self.span.start + first
        if chunk.start != start or chunk.index_codec != pb.INDEX_CODEC_DENSE:
            raise Rejected(ErrorCode.BAD_CHUNK, f"chunk at {chunk.start}, expected a dense one at {start}")
        if not 0 < count <= min(MAX_ENTRIES, self.span.end - start) or count != chunk.length or chunk.indices:
            raise Rejected(
                ErrorCode.BAD_CHUNK,
                f"a dense chunk of {chunk.length} elements has {count} entries and {len(chunk.indices)} index bytes; "
                f"{self.span.end - start} elements are missing",
            )
        data = next(iter(values), memoryview(chunk.values))
        _read_values(chunk.value_codec, data, self.values[first : first + count])
        self.checksum.add(chunk, *values)

    def require_complete(self) -> None:
        """Check that everything has arrived; raises :class:`Rejected` (``BAD_COMMIT``) if not."""
        if self.checksum.entries != self.span.length:
            raise Rejected(ErrorCode.BAD_COMMIT, f"{self.checksum.entries} of {self.span.length} elements were sent")


def _read_values(codec: int, data: memoryview, place: torch.Tensor) -> None:
    """Read finite values, fp32 ones straight to their place, or words; raises :class:`Rejected`."""
    into: NDArray[Any] = place.numpy()
    if codec != pb.VALUE_CODEC_FP32 or place.dtype != torch.float32:
        into[:] = decode_values(codec, cast(bytes, data), into.size, place.dtype)  # a codec reads any buffer
        return
    if data.nbytes != into.nbytes:
        raise Rejected(ErrorCode.BAD_CHUNK, f"{data.nbytes} value bytes, {into.size} entries in fp32 need others")
    values = np.frombuffer(data, "<f4")
    for start in range(0, into.size, _BLOCK):  # which is checked while it is in the processor's cache
        block = into[start : start + _BLOCK]
        block[:] = values[start : start + _BLOCK]
        if not np.isfinite(block).all():
            raise Rejected(ErrorCode.NON_FINITE, "an fp32 value is not finite")


def fields(raw: bytes, position: int = 0, end: int | None = None) -> Iterator[tuple[int, int, int]]:
    """Yield the number of each field of a serialised message, and where its content begins and ends.

    A number's content is empty. What breaks the format ends the fields, or the message; nothing is raised.
    """
    end = len(raw) if end is None else end
    while position < end:
        tag, position = read_varint(raw, position, end)
        kind = tag & 7
        if tag < 8:
            return  # no field has the number 0
        if kind == 2:
            length, position = read_varint(raw, position, end)
            yield tag >> 3, position, min(end, position + length)
            position += length
            continue
        if kind == 0:
            _, position = read_varint(raw, position, end)
        elif kind in (1, 5):
            position += 8 if kind == 1 else 4
        else:
            return
        yield tag >> 3, position, position


def count_fields(raw: bytes, position: int, end: int, most: int) -> int:
    """Count the fields between two positions of a message, up to one more than ``most``."""
    count = 0
    while position < end and count <= most:
        # A short message or text, as nearly all are, without a call for it.
        tag = raw[position]
        if tag & 0x87 == 2 and tag > 7 and position + 1 < end and raw[position + 1] < 0x80:
            position += 2 + raw[position + 1]
        else:
            position = next(fields(raw, position, end), (0, end, end))[2]
        count += 1
    return count


def read_varint(raw: bytes, position: int, end: int) -> tuple[int, int]:
    """Return a number of the wire format and where it ends; what is cut ends with the message."""
    value = shift = 0
    while position < end and shift < 64:
        byte = raw[position]
        position += 1
        if byte < 0x80:
            return value | byte << shift, position
        value |= (byte & 0x7F) << shift
        shift += 7
    return value, position


def _varint(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])

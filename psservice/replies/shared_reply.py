"""Exact replies that several workers share: read once, encoded once."""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pscore.model.sparse_slice import SparseSlice
from pscore.wire import frames
from pscore.wire.codecs import residue
from pscore.wire.dense import bytes_of, chunk_field, field_bytes, message_bytes
from pscore.wire.frames import WireForm
from pscore.wire.v1 import parameter_server_pb2 as pb

_CHECKED_BYTES = 1 << 20  # of an exact reply, after which the worker may verify what came so far
_TOGETHER_BYTES = 64 << 10  # of chunks that are sent together on any link
_TOGETHER_SECONDS = 0.02  # that the chunks sent together may take on the link


@dataclass(frozen=True, slots=True)
class Residues:
    """Entries of fp16 or bf16, of which the reader has others, and the most places that each may be away.

    ``distances`` are uint16 ``[k]``, :data:`~pscore.wire.codecs.residue.UNKNOWN` if nothing is known.
    """

    entries: SparseSlice
    distances: NDArray[np.uint16]


Segment = SparseSlice | Residues | pb.Chunk


class Messages(Protocol):
    """The serialised ``PullDiffResponse`` messages of a reply behind its header: chunks, then the commit. Thread-safe.

    Each reader gets the same bytes.

    Attributes:
        failed: whether a message could not be written: no reader gets a commit any more.
    """

    failed: bool

    @property
    def nbytes(self) -> int:
        """Upper bound of the bytes of the messages, and of what they are still written from."""

    def __iter__(self) -> Iterator[bytes]: ...


class DenseMessages:
    """Messages of all values, which each reader reads anew, as it sends them: no message is kept.

    ``nbytes`` are kept to read them.
    """

    def __init__(
        self, segments: Callable[[], Iterator[Segment]], form: WireForm, chunk_bytes: int, nbytes: int = 0
    ) -> None:
        self._segments, self._form, self._chunk_bytes, self._nbytes = segments, form, chunk_bytes, nbytes
        self.failed = False

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return self._nbytes

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from _write(self._segments(), self._form, self._chunk_bytes)
        except GeneratorExit:
            raise
        except BaseException:
            self.failed = True
            raise


class ReplyMessages:
    """Messages that are written when the first reader reaches them, and kept.

    Segments have a ``so_far`` behind each MiB; chunks, whose bytes are known, have none. ``most_bytes`` are occupied
    until everything is written.
    """

    def __init__(self, segments: Iterable[Segment], form: WireForm, chunk_bytes: int, most_bytes: int = 0) -> None:
        self._unwritten: Iterator[bytes] | None = _write(segments, form, chunk_bytes)
        self._written: list[bytes] = []
        self._most_bytes, self._written_bytes = most_bytes, 0
        self.failed = False
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that are occupied."""
        return self._written_bytes if self._unwritten is None else max(self._most_bytes, self._written_bytes)

    def __iter__(self) -> Iterator[bytes]:
        position = 0
        while (message := self._message(position)) is not None:
            yield message
            position += 1

    def _message(self, position: int) -> bytes | None:
        if position < len(self._written):
            return self._written[position]
        with self._lock:
            if position == len(self._written) and self._unwritten is not None:
                try:
                    message = next(self._unwritten, None)
                except BaseException:
                    self.failed = True
                    raise
                if message is None:
                    self._unwritten = None  # frees the entries
                else:
                    self._written.append(message)
                    self._written_bytes += len(message)
            return self._written[position] if position < len(self._written) else None


def _write(segments: Iterable[Segment], form: WireForm, chunk_bytes: int) -> Iterator[bytes]:
    """Write segments, or the chunks of a reply whose bytes are known, which needs no ``so_far``.

    Chunks are sent together, as many as the link carries in a moment.
    """
    checksum, unchecked, size = frames.Checksum(), 0, 0
    most = max(_TOGETHER_BYTES, message_bytes(form.link_bytes_per_second, _TOGETHER_SECONDS))
    parts, so_far = list[bytes | memoryview](), checksum.commit()
    for segment in segments:
        for written in _chunk_fields(segment, form, chunk_bytes, checksum):
            nbytes = sum(map(len, written))
            if parts and size + nbytes > most:
                if not isinstance(segment, pb.Chunk) and unchecked >= _CHECKED_BYTES:
                    parts.append(field_bytes(pb.PullDiffResponse.SO_FAR_FIELD_NUMBER, so_far))
                    unchecked = 0
                yield b"".join(parts)
                parts, size = [], 0
            parts += written
            size, unchecked, so_far = size + nbytes, unchecked + nbytes, checksum.commit()
    commit = field_bytes(pb.PullDiffResponse.COMMIT_FIELD_NUMBER, checksum.commit())
    yield b"".join((*parts, commit))


def _chunk_fields(
    segment: Segment, form: WireForm, chunk_bytes: int, checksum: frames.Checksum
) -> Iterator[list[bytes | memoryview]]:
    if isinstance(segment, pb.Chunk):
        checksum.add(segment)
        yield chunk_field(segment)
    elif isinstance(segment, Residues):
        words = segment.entries.values.view(torch.uint16).numpy()
        for chunk, first in frames.chunks_without_values(segment.entries, form, chunk_bytes):
            there = slice(first, first + chunk.count)
            if (written := residue.encode(words[there], segment.distances[there])) is not None:
                chunk.value_codec, chunk.values = pb.VALUE_CODEC_RESIDUE, written
            else:
                chunk.values = words[there].astype("<u2").tobytes()
            checksum.add(chunk)
            yield chunk_field(chunk)
    else:  # exact values travel in their own dtype: their bytes are copied into the message and nowhere else
        for chunk, first in frames.chunks_without_values(segment, form, chunk_bytes):
            values = bytes_of(segment.values[first : first + chunk.count])
            checksum.add(chunk, values)
            yield chunk_field(chunk, values)


@dataclass(frozen=True, slots=True)
class SharedReply:
    """An exact reply without what differs from worker to worker.

    Attributes:
        position: changes that the log had recorded when the values were those of ``version``.
        is_dense: whether every element was sent because the changes were not known, or were everything.
        nbytes: upper bound of the bytes that the reply occupies.
    """

    position: int
    version: int
    entries: int
    is_dense: bool
    nbytes: int
    messages: Messages

    @property
    def failed(self) -> bool:
        """Whether a message could not be written."""
        return self.messages.failed

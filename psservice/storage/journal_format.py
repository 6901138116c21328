"""Journal records: how they lie in a file, and how a file is read back when its end or its middle is damaged.

A segment is a file of records behind a 20-byte head: ``SPSJRNL2``, a random mark of this segment, and a CRC-32 of
both. A record is

    mark    8 bytes   the segment's: what an old file left on the disk does not have
    length  uint64    of the body
    kind    uint32
    crc     uint32    CRC-32 of length and kind, continued over the body
    body    length bytes

Integers are little-endian. A file ends anywhere inside its last record where a process or a machine died. So a record
that is cut or does not check, with no record behind it, is a *torn tail*; with one behind it, the file is *damaged*
there. The watermark (:mod:`psservice.storage.lock_file`) tells whether a torn tail was acknowledged.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from psservice.storage.files import DISK, Files, StorageError

MAGIC = b"SPSJRNL2"
MARK_BYTES = 8
_HEAD = struct.Struct("<8s8sI")
HEAD_BYTES = _HEAD.size
_FRAME = struct.Struct("<8sQII")
_CHECKED = struct.Struct("<QI")
_SEARCH_BYTES = 1 << 20


class DamagedError(StorageError):
    """A journal is damaged before its end; ``what`` is the message without the advice."""

    def __init__(self, path: Path, offset: int, why: str) -> None:
        self.path, self.offset = path, offset
        self.what = f"{path} is damaged at byte {offset}: {why}; records behind it cannot be trusted"
        super().__init__(
            f"{self.what}. Restore the file from a copy, or start with --recover last-good to go back to the version "
            "before it"
        )


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a segment, ``offset`` to ``end`` in the file."""

    kind: int
    body: bytes
    offset: int
    end: int


@dataclass(frozen=True, slots=True)
class Body:
    """The parts of a record's body and their CRC so far, computed beside the thread that appends."""

    parts: tuple[bytes, ...]
    length: int
    crc: int

    @classmethod
    def of(cls, parts: Sequence[bytes]) -> "Body":
        """Join parts, without copying them."""
        return cls((), 0, 0).with_parts(*parts)

    def with_parts(self, *parts: bytes) -> "Body":
        """Add parts behind."""
        crc = self.crc
        for part in parts:
            crc = zlib.crc32(part, crc)
        return Body((*self.parts, *parts), self.length + sum(map(len, parts)), crc)


def head_with(mark: bytes) -> bytes:
    """Return the head of a segment with this mark."""
    return _HEAD.pack(MAGIC, mark, zlib.crc32(MAGIC + mark))


def frame(mark: bytes, kind: int, body: Body) -> bytes:
    """Return the bytes that stand before a body."""
    crc = zlib.crc32(_CHECKED.pack(body.length, kind), body.crc)
    return _FRAME.pack(mark, body.length, kind, crc)


class Segment:
    """A reader of one segment.

    Attributes:
        good: bytes up to the end of the last record that was read.
        torn: why reading ended before the end of the file; ``None`` where it did not.
    """

    def __init__(self, path: Path, files: Files = DISK) -> None:
        self.path, self._files = path, files
        self.good = 0
        self.torn: str | None = None
        self._size, self._mark = 0, b""

    def records(self) -> Iterator[Record]:
        """Yield the records up to the end or a torn tail.

        Raises:
            DamagedError: a record does not check and there are others behind it.
            StorageError: the file cannot be read; a running server may have removed the file meanwhile.
        """
        try:
            file = self._files.open(self.path)
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror}") from error
        with file:
            if not self._read_head(file):
                if self._size > HEAD_BYTES:
                    raise DamagedError(self.path, 0, "its head does not check")
                cut = self._size < HEAD_BYTES
                self.torn = "the file ends inside its head" if cut else "its head does not check"
                return
            self.good = HEAD_BYTES
            while self.good < self._size:
                record = self._read(file, self.good)
                if isinstance(record, str):
                    following = self._next_record(file)
                    if following is not None:
                        raise DamagedError(
                            self.path, self.good, f"{record}, and there is a record at {following.offset}"
                        )
                    self.torn = record
                    return
                yield record
                self.good = record.end

    def behind(self) -> Iterator[Record]:
        """Yield the records behind the end of what was read that check all the same; none where there is no file."""
        with suppress(OSError), self._files.open(self.path) as file:
            if self._read_head(file):
                while (record := self._next_record(file)) is not None:
                    yield record
                    self.good = record.end - 1

    def _read_head(self, file: BinaryIO) -> bool:
        """Learn the file's size and mark; return whether the head checks."""
        self._size = file.seek(0, 2)
        file.seek(0)
        head = file.read(HEAD_BYTES)
        self._mark = head[len(MAGIC) : len(MAGIC) + MARK_BYTES]
        return len(head) == HEAD_BYTES and head == head_with(self._mark)

    def _read(self, file: BinaryIO, offset: int) -> Record | str:
        """Return the record at a position, or what is wrong with it."""
        file.seek(offset)
        data = file.read(_FRAME.size)
        if len(data) < _FRAME.size:
            return "the file ends inside the head of a record"
        found, length, kind, crc = _FRAME.unpack(data)
        if found != self._mark:
            return "there is no record where one should begin"
        end = offset + _FRAME.size + length
        if end > self._size:  # before anything is allocated
            return f"a record of {length} bytes is cut by the end of the file"
        body = file.read(length)
        if zlib.crc32(_CHECKED.pack(length, kind), zlib.crc32(body)) != crc:
            return f"the checksum of a record of {length} bytes does not hold"
        return Record(kind, body, offset, end)

    def _next_record(self, file: BinaryIO) -> Record | None:
        """Search for a record that checks behind the end of what was read."""
        position = self.good + 1
        while position < self._size:
            file.seek(position)
            found = file.read(_SEARCH_BYTES + MARK_BYTES - 1).find(self._mark)
            if found < 0:
                position += _SEARCH_BYTES
                continue
            record = self._read(file, position + found)
            if not isinstance(record, str):
                return record
            position += found + 1
        return None

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
there. Whether a torn tail was acknowledged is said in :mod:`psservice.storage.lock_file`.
"""

import os
import secrets
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from psservice.storage.files import StorageError

MAGIC = b"SPSJRNL2"
MARK_BYTES = 8
_HEAD = struct.Struct("<8s8sI")
HEAD_BYTES = _HEAD.size
_FRAME = struct.Struct("<8sQII")
_CHECKED = struct.Struct("<QI")
_SEARCH_BYTES = 1 << 20


class DamagedError(StorageError):
    """A journal is damaged before its end.

    Attributes:
        path: the file.
        offset: where the record begins that does not check.
        what: the damage, without what can be done.
    """

    def __init__(self, path: Path, offset: int, why: str) -> None:
        """Say where, and what can be done."""
        self.path, self.offset = path, offset
        self.what = f"{path} is damaged at byte {offset}: {why}; records behind it cannot be trusted"
        super().__init__(
            f"{self.what}. Restore the file from a copy, or start with --recover last-good to go back to the version "
            "before it"
        )


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a segment.

    Attributes:
        kind: what the body is.
        body: its bytes.
        offset: where it begins in the file.
        end: where the next one begins.
    """

    kind: int
    body: bytes
    offset: int
    end: int


@dataclass(frozen=True, slots=True)
class Body:
    """The parts of a record's body and their CRC so far, made beside the thread that appends."""

    parts: tuple[bytes, ...]
    length: int
    crc: int

    @classmethod
    def of(cls, parts: Sequence[bytes]) -> "Body":
        """Join parts, without copying them."""
        crc = 0
        for part in parts:
            crc = zlib.crc32(part, crc)
        return cls(tuple(parts), sum(map(len, parts)), crc)

    def with_part(self, part: bytes) -> "Body":
        """Add a part behind."""
        return Body((*self.parts, part), self.length + len(part), zlib.crc32(part, self.crc))


def new_head() -> tuple[bytes, bytes]:
    """Return the head of a new segment, and the mark in it, which is its own."""
    mark = secrets.token_bytes(MARK_BYTES)
    return _HEAD.pack(MAGIC, mark, zlib.crc32(MAGIC + mark)), mark


def mark_in(head: bytes) -> bytes | None:
    """Return the mark in a segment's head; ``None`` where it does not check."""
    if len(head) < HEAD_BYTES:
        return None
    magic, mark, crc = _HEAD.unpack(head)
    return mark if magic == MAGIC and crc == zlib.crc32(magic + mark) else None


def frame(mark: bytes, kind: int, body: Body) -> bytes:
    """Return the bytes that stand before a body."""
    crc = zlib.crc32(_CHECKED.pack(body.length, kind), body.crc)
    return _FRAME.pack(mark, body.length, kind, crc)


@dataclass(slots=True)
class Segment:
    """A segment that is read.

    Attributes:
        path: the file.
        good: bytes up to the end of the last record that was read.
        torn: why reading ended before the end of the file; ``None`` where it did not.
    """

    path: Path
    good: int = 0
    torn: str | None = None

    def records(self) -> Iterator[Record]:
        """Yield the records up to the end or a torn tail.

        Raises:
            DamagedError: a record does not check and there are others behind it.
        """
        try:
            file = self.path.open("rb")
        except OSError as error:  # a running server may have removed it meanwhile
            raise StorageError(f"cannot read {self.path}: {error.strerror}") from error
        with file:
            size = os.fstat(file.fileno()).st_size
            mark = mark_in(file.read(HEAD_BYTES))
            if mark is None:
                if size > HEAD_BYTES:
                    raise DamagedError(self.path, 0, "its head does not check")
                self.torn = "its head does not check" if size == HEAD_BYTES else "the file ends inside its head"
                return
            self.good = HEAD_BYTES
            while self.good < size:
                record = self._read(file, mark, size)
                if isinstance(record, str):
                    following = self._next_record(file, mark, size)
                    if following is not None:
                        raise DamagedError(self.path, self.good, f"{record}, and there is a record at {following}")
                    self.torn = record
                    return
                yield record
                self.good = record.end

    def behind(self) -> Iterator[Record]:
        """Yield the records behind the end of what was read that check all the same; none where there is no file."""
        with suppress(OSError), self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            mark = mark_in(file.read(HEAD_BYTES))
            while mark is not None and (at := self._next_record(file, mark, size)) is not None:
                record = self._read(file, mark, size, at)
                assert isinstance(record, Record)
                yield record
                self.good = record.end - 1

    def _read(self, file: BinaryIO, mark: bytes, size: int, at: int | None = None) -> Record | str:
        """Return the record at a position, or what is wrong with it."""
        offset = self.good if at is None else at
        file.seek(offset)
        data = file.read(_FRAME.size)
        if len(data) < _FRAME.size:
            return "the file ends inside the head of a record"
        found, length, kind, crc = _FRAME.unpack(data)
        if found != mark:
            return "there is no record where one should begin"
        end = offset + _FRAME.size + length
        if end > size:  # before anything is allocated
            return f"a record of {length} bytes is cut by the end of the file"
        body = file.read(length)
        if zlib.crc32(_CHECKED.pack(length, kind), zlib.crc32(body)) != crc:
            return f"the checksum of a record of {length} bytes does not hold"
        return Record(kind, body, offset, end)

    def _next_record(self, file: BinaryIO, mark: bytes, size: int) -> int | None:
        """Look for a record that checks behind the one that does not."""
        position = self.good + 1
        while position < size:
            file.seek(position)
            window = file.read(_SEARCH_BYTES + MARK_BYTES - 1)
            found = window.find(mark)
            if found < 0:
                position += _SEARCH_BYTES
                continue
            if not isinstance(self._read(file, mark, size, position + found), str):
                return position + found
            position += found + 1
        return None

"""How records lie in a segment of the journal, and how damage differs from the end that a crash has left.

A segment is a file of records behind a head; docs/operate/durability.md has both byte by byte. A file ends
anywhere inside its last record if a process or a machine died. So a record that is cut or does not
check, with no record behind it, is a *torn tail*; with one behind it, the file is *damaged* there. The watermark
(:mod:`psservice.storage.lock_file`) tells whether a torn tail was acknowledged.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

from isal.isal_zlib import crc32

from psservice.storage.files import StorageError

MAGIC = b"SPSJRNL2"
MARK_BYTES = 8
_HEAD = struct.Struct("<8s8sI")  # magic, mark, CRC of both
HEAD_BYTES = _HEAD.size
FRAME = struct.Struct("<8sQII")  # mark, which no leftover of an old file has, length, kind, CRC
_CHECKED = struct.Struct("<QI")  # length, kind


class DamagedError(StorageError):
    """A journal is damaged before its end; ``damage`` is the message without the advice."""

    def __init__(self, path: Path, offset: int, why: str) -> None:
        self.path, self.offset = path, offset
        self.damage = f"{path} is damaged at byte {offset}: {why}; records behind it cannot be trusted"
        super().__init__(
            f"{self.damage}. Restore the file from a copy, or start with --recover last-good to go back to the "
            "version before it"
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
    """The parts of a record's body and their CRC, which other threads than the one that appends compute."""

    parts: tuple[bytes, ...] = ()
    crc: int = 0

    def with_parts(self, *parts: bytes) -> "Body":
        """Add parts behind, without a copy."""
        crc = self.crc
        for part in parts:
            crc = crc32(part, crc)
        return Body((*self.parts, *parts), crc)


def segment_head(mark: bytes) -> bytes:
    """Return the head of a segment with this mark."""
    return _HEAD.pack(MAGIC, mark, crc32(MAGIC + mark))


def frame(mark: bytes, kind: int, body: Body) -> bytes:
    """Return the bytes that stand before a body."""
    length = sum(map(len, body.parts))
    return FRAME.pack(mark, length, kind, record_crc(length, kind, body.crc))


def record_crc(length: int, kind: int, body_crc: int) -> int:
    """Return the checksum of a record."""
    return crc32(_CHECKED.pack(length, kind), body_crc)

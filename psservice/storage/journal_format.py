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

from pscore.version import __version__
from psservice.storage.files import StorageError
from psservice.storage.formats import require_mark

MAGIC = b"SPSJRNL3"
MARK_BYTES = 8
_HEAD = struct.Struct("<8s8s16sI")  # magic, mark, release, CRC of all; every later format begins so
HEAD_BYTES = _HEAD.size
_RELEASE_BYTES = 16
_EARLIER, _EARLIER_HEAD_BYTES, _BEFORE = b"SPSJRNL2", 20, "before psservice 0.1.0"
_ADVICE = (
    "the journal has records behind the last snapshot. Start the release that wrote them and stop it, and then start "
    "this one"
)
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


EMPTY = Body()
"""No part."""


def segment_head(mark: bytes, release: bytes = __version__.encode()) -> bytes:
    """Return the head of a segment with this mark, that a release writes."""
    release = release[:_RELEASE_BYTES].ljust(_RELEASE_BYTES, b"\0")
    return _HEAD.pack(MAGIC, mark, release, crc32(MAGIC + mark + release))


def read_mark(path: Path, head: bytes) -> bytes | None:
    """Return the mark in a segment's head; ``None`` if the head does not check.

    Raises :class:`~psservice.storage.formats.OtherReleaseError` if another release wrote the file.
    """
    release = head[16:32].rstrip(b"\0").decode("ascii", "replace")
    require_mark(path, head, MAGIC, _BEFORE if head.startswith(_EARLIER) else f"psservice {release}", _ADVICE)
    if len(head) < HEAD_BYTES:
        return None
    _, mark, _, _ = _HEAD.unpack(head)
    return mark if head == segment_head(mark, head[16:32]) else None


def is_left_empty(head: bytes, size: int) -> bool:
    """Tell whether an earlier release began a segment of ``size`` bytes and wrote no record to it.

    Nothing is behind the snapshot with which that release was stopped, so this one goes on from there.
    """
    return head.startswith(_EARLIER) and size <= _EARLIER_HEAD_BYTES


def frame(mark: bytes, kind: int, body: Body) -> bytes:
    """Return the bytes that stand before a body."""
    length = sum(map(len, body.parts))
    return FRAME.pack(mark, length, kind, record_crc(length, kind, body.crc))


def record_crc(length: int, kind: int, body_crc: int) -> int:
    """Return the checksum of a record."""
    return crc32(_CHECKED.pack(length, kind), body_crc)

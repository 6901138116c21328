"""The next part of a data directory behind the one that a standby has: bytes of the journal, or a snapshot."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from psservice.storage.files import Files
from psservice.storage.journal import Position, segment_path
from psservice.storage.journal_format import HEAD_BYTES, read_mark
from psservice.storage.manifest import MANIFEST_NAME, TENSORS_NAME
from psservice.storage.snapshots import Snapshot

MOST_JOURNAL_BYTES = 4 << 20
"""Of one part, so that a standby tells its position often."""


@dataclass(frozen=True, slots=True)
class HeldPart:
    """The part of a data directory that a standby has.

    Attributes:
        position: the end of its newest segment, or the beginning of the one behind its snapshot; zeros without both.
        mark: of that segment; empty if it has nothing of it.
        generation: of the model in its newest snapshot; 0 if it has none.
    """

    position: Position
    mark: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class JournalPart:
    """Bytes of the journal from a position on."""

    begin: Position
    data: bytes


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """A snapshot, as open files, which its reader closes; ``begin`` is where the journal goes on behind it.

    ``continues``: whether the standby's segment belongs to the same journal.
    """

    begin: Position
    manifest: BinaryIO
    manifest_bytes: int
    tensors: BinaryIO
    tensors_bytes: int
    continues: bool

    def close(self) -> None:
        """Close the files."""
        self.manifest.close()
        self.tensors.close()


def part_behind(
    files: Files, journals: Path, held: HeldPart, newest: Snapshot, end: Position
) -> JournalPart | SnapshotPart | None:
    """Return the next part, of a journal that ends at ``end``; ``None`` if there is none.

    A snapshot, the newest, follows if the part is of another journal, if its model is of another generation, or if the
    journal behind it is gone. Raises ``OSError``.
    """
    begin = _next_position(files, journals, held, end)
    if begin is None or held.generation != newest.manifest.generation:
        return _snapshot_part(files, newest, held.position if begin is not None else None)
    if begin == end:
        return None
    most = min(MOST_JOURNAL_BYTES, end.offset - begin.offset) if begin.segment == end.segment else MOST_JOURNAL_BYTES
    with files.open(segment_path(journals, begin.segment)) as file:
        file.seek(begin.offset)
        return JournalPart(begin, file.read(most))


def _next_position(files: Files, journals: Path, held: HeldPart, end: Position) -> Position | None:
    """Return where a part goes on; ``None`` if it is of another journal, or that place is gone."""
    position = held.position
    size = _size(files, segment_path(journals, position.segment), held.mark if position.offset else None)
    if size is None or position.offset > size or position > end:
        return None
    if position.offset < size or position.segment == end.segment:
        return position
    following = Position(position.segment + 1, 0)
    with suppress(OSError), files.open(segment_path(journals, following.segment)):
        return following
    return None


def _size(files: Files, path: Path, mark: bytes | None) -> int | None:
    """Return the bytes of a segment; ``None`` if it is not there, or does not have the mark, if one is given."""
    try:
        with files.open(path) as file:
            is_ours = mark is None or (mark and read_mark(path, file.read(HEAD_BYTES)) == mark)
            return file.seek(0, os.SEEK_END) if is_ours else None
    except OSError:
        return None


def _snapshot_part(files: Files, newest: Snapshot, at: Position | None) -> SnapshotPart:
    number = newest.manifest.segment
    continues = at is not None and at.segment >= number
    begin = at if at is not None and continues else Position(number, 0)
    manifest = files.open(newest.path / MANIFEST_NAME)
    try:
        tensors = files.open(newest.path / TENSORS_NAME)
    except BaseException:
        manifest.close()
        raise
    sizes = [file.seek(0, os.SEEK_END) for file in (manifest, tensors)]
    for file in (manifest, tensors):
        file.seek(0)
    return SnapshotPart(begin, manifest, sizes[0], tensors, sizes[1], continues)

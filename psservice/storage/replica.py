"""The data directory of a standby: the same snapshots and segments, byte for byte, as those of the shard it follows.

Its lock says that it is a standby's. A server that starts on it has all that the standby has got, and begins a new
history: nobody knows here what the other server has acknowledged since.
"""

import logging
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from psservice.model.copies import TensorCopy
from psservice.settings import ServerSettings
from psservice.storage import snapshots
from psservice.storage.environment import Environment
from psservice.storage.files import Files, OpenFile, StorageError, discard
from psservice.storage.journal import (
    Position,
    SegmentReader,
    remove_segments_before,
    segment_numbers,
    segment_path,
)
from psservice.storage.journal_format import HEAD_BYTES, read_mark
from psservice.storage.lock_file import STANDBY, LockFile, Watermark
from psservice.storage.manifest import MANIFEST_NAME, TENSORS_NAME, FileSeal, Manifest
from psservice.storage.parts import HeldPart
from psservice.storage.record_ends import RecordEnds
from psservice.storage.snapshots import Snapshot

log = logging.getLogger(__name__)

LARGEST_MANIFEST_BYTES = 1 << 30

PROMOTED_NAME = "promoted"
"""Of the empty file in the directory of a shard whose standby was to serve: the next start is that of a server."""

AHEAD_NAME = "ahead"
"""Of the empty file in the directory of a standby whose primary has come back with less than the standby has."""

_RECEIVED = ".received.tmp"


def was_promoted(settings: ServerSettings, files: Files) -> bool:
    """Tell whether this standby, or one of another shard of its command, was to serve before the command ended."""
    assert settings.data_dir is not None
    shards = range(settings.shards) if settings.shards > 1 else [settings.shard_index]
    directories = [settings.data_dir / f"shard-{index}-of-{settings.num_shards}" for index in shards]
    return any(PROMOTED_NAME in files.list(directory) for directory in directories)


class Replica:
    """Takes parts of another shard's directory, and takes snapshots of its own.

    One thread takes parts, by :meth:`append` and :meth:`take_snapshot`; another one may call :meth:`keep`. Raises
    :class:`StorageError` if another process has the directory, or a server that is no standby has used it.

    Attributes:
        newest: snapshot; ``None`` without any.
        is_ahead: whether the primary has come back with less than is here, which then must not follow it.
    """

    def __init__(self, settings: ServerSettings, environment: Environment) -> None:
        assert settings.data_dir is not None
        self._settings, self._environment, self.files = settings, environment, environment.files
        self.path = settings.data_dir / f"shard-{settings.shard_index}-of-{settings.num_shards}"
        self._snapshots, self._journals = self.path / "snapshots", self.path / "journal"
        self._changing = threading.Lock()  # which snapshots and segments there are
        self._file: OpenFile | None = None
        self._position, self._durable, self._mark = Position(), 0, b""
        self._ends = RecordEnds()
        self._synced = environment.monotonic()
        self._lock_file = LockFile(self.path, self.files)
        try:
            self._begin()
        except OSError as error:
            self._lock_file.close()
            raise StorageError(f"cannot write to {self.path} (--data-dir): {error.strerror}") from error
        except BaseException:
            self._lock_file.close()
            raise

    def _begin(self) -> None:
        before = self._lock_file.watermark
        for directory in (self._snapshots, self._journals):
            self.files.make_directory(directory)
        kept = snapshots.readable(self.files, self._snapshots)
        if (before.fsync != STANDBY) if before is not None else bool(kept):
            raise StorageError(
                f"{self.path} is the data directory of a server, and no standby's: give a standby an empty --data-dir, "
                "or move this one away first"
            )
        snapshots.remove_unfinished(self.files, self._snapshots)
        begun = replace(before or Watermark(), boot_id=self.files.boot_id(), fsync=STANDBY, clean=False)
        self._lock_file.begin(begun)
        self.is_ahead = AHEAD_NAME in self.files.list(self.path)
        self.newest = kept[-1] if kept else None
        for number in reversed(segment_numbers(self.files, self._journals)):
            if self._open_end(number):
                break

    def _open_end(self, number: int) -> bool:
        """Go on behind the last whole record of a segment; false if it has not got its head, and is removed."""
        path = segment_path(self._journals, number)
        reader = SegmentReader(path, self.files)
        for _ in reader.records():
            pass
        if not reader.valid_bytes:
            self.files.remove(path)
            return False
        self.files.cut(path, reader.valid_bytes)
        with self.files.open(path) as file:
            self._mark = read_mark(path, file.read(HEAD_BYTES)) or b""
        self._file = self.files.open_end(path)
        self._position, self._durable = Position(number, reader.valid_bytes), 0
        self._ends = RecordEnds(reader.valid_bytes)
        return True

    @property
    def held(self) -> HeldPart:
        """The position, mark and generation of the directory; for the thread that takes parts."""
        newest = self.newest
        if newest is None:
            return HeldPart(self._position, self._mark, 0)
        first = Position(newest.manifest.segment, 0)  # until the first bytes behind the snapshot have come
        return HeldPart(max(self._position, first), self._mark, newest.manifest.generation)

    @property
    def segment(self) -> int:
        """The newest segment, which goes on; 0 if there is none. Those before are complete."""
        return self._position.segment

    def append(self, begin: Position, data: bytes) -> None:
        """Write down bytes of the journal, as durably as ``--fsync`` says; raises :class:`StorageError`."""
        if not data:
            return
        is_new = begin.offset == 0 and begin.segment > self._position.segment
        if not is_new and begin != self._position:
            raise StorageError(f"the journal was to go on at {self._position}, and goes on at {begin}")
        try:
            if is_new:
                self._open_segment(begin.segment, data)
            assert self._file is not None
            self._file.append([data])
            if self._settings.fsync == "always":
                self._file.sync()
                self._durable = begin.offset + len(data)
            self._position = Position(begin.segment, begin.offset + len(data))
            self._ends.take(begin.offset, data)
            self._note_end()
        except OSError as error:
            self._cut()
            raise StorageError(f"cannot write to {self._journals}: {error.strerror or error}") from error

    def _open_segment(self, number: int, data: bytes) -> None:
        path = segment_path(self._journals, number)
        mark = read_mark(path, data[:HEAD_BYTES])
        if mark is None:
            raise StorageError(f"segment {number} of the journal does not begin with its head")
        with self._changing:
            self._sync_end()
            self.files.remove(path)  # of a journal that is no longer followed
            file = self.files.open_new(path)
            if self._file is not None:
                self._file.close()
            self._file, self._mark, self._position, self._durable = file, mark, Position(number, 0), 0
            self._ends = RecordEnds()
            if self._settings.fsync != "never":
                self.files.sync(self._journals)

    def _cut(self) -> None:
        """Remove the bytes that a failed write has left behind the end."""
        if self._file is not None:
            try:
                self._file.cut(self._position.offset)
            except OSError as error:
                log.error("bytes behind the end stay", extra={"path": str(self._journals), "error": str(error)})

    def sync_in_time(self) -> None:
        """With ``--fsync interval``, force the journal to the disk if the period is over; for the thread of parts.

        Raises :class:`StorageError`.
        """
        now = self._environment.monotonic()
        if self._settings.fsync != "interval" or now - self._synced < self._settings.fsync_interval_seconds:
            return
        try:
            self._sync_end()
        except OSError as error:
            raise StorageError(f"cannot force {self._journals} to the disk: {error.strerror or error}") from error
        self._synced = now

    def _sync_end(self) -> None:
        if self._file is not None and self._settings.fsync != "never" and self._durable < self._position.offset:
            self._file.sync()
            self._durable = self._position.offset
            self._note_end()

    def _note_end(self, **changes: int) -> None:
        """Write down how far the journal is here, in whole records: nobody has acknowledged a part of one."""
        whole = self._ends.whole
        durable = min(whole, self._durable)
        self._lock_file.note(segment=self._position.segment, appended=whole, durable=durable, **changes)

    def take_snapshot(
        self, manifest_bytes: int, tensors_bytes: int, data: Iterable[bytes], *, continues: bool
    ) -> Snapshot:
        """Write down a snapshot that comes in pieces, manifest first; return it once it has its name.

        Without ``continues`` all else is dropped. Raises :class:`StorageError`.
        """
        if manifest_bytes > LARGEST_MANIFEST_BYTES:
            raise StorageError(f"a manifest of {manifest_bytes} bytes is no manifest")
        pieces = _Pieces(data)
        manifest = _manifest(pieces.exactly(manifest_bytes), self._settings)
        temporary = self._snapshots / _RECEIVED
        discard(self.files, temporary)
        try:
            self.files.make_directory(temporary)
            seal = self._write_tensors(temporary / TENSORS_NAME, pieces.up_to(tensors_bytes))
            if seal != manifest.tensors:
                raise StorageError("the tensors of a snapshot are not those that its manifest describes")
            self.files.write(temporary / MANIFEST_NAME, pieces.manifest)
            for each in (temporary / MANIFEST_NAME, temporary):
                self.files.sync(each)
            with self._changing:
                return self._place(temporary, manifest, continues=continues)
        except OSError as error:
            raise StorageError(f"cannot write a snapshot to {self._snapshots}: {error.strerror or error}") from error
        finally:
            discard(self.files, temporary)

    def _write_tensors(self, path: Path, data: Iterable[bytes]) -> FileSeal:
        file, size, crc = self.files.open_new(path), 0, 0
        try:
            for each in data:
                file.append([each])
                size, crc = size + len(each), zlib.crc32(each, crc)
            file.sync()
        finally:
            file.close()
        return FileSeal(bytes=size, crc32=crc)

    def _place(self, temporary: Path, manifest: Manifest, *, continues: bool) -> Snapshot:
        """Give a whole snapshot its name, and drop snapshots and segments that do not belong to it."""
        path = self._snapshots / snapshots.name_of(manifest)
        for each in snapshots.readable(self.files, self._snapshots):
            if each.path == path or each.manifest.segment >= manifest.segment:
                discard(self.files, each.path)
        self.files.rename(temporary, path)
        self.files.sync(self._snapshots)
        if not continues:
            if self._file is not None:
                self._file.close()
            self._file, self._position, self._mark, self._durable = None, Position(), b"", 0
            self._ends = RecordEnds()
            for number in segment_numbers(self.files, self._journals):
                self.files.remove(segment_path(self._journals, number))
        self._note_end(snapshot=manifest.segment, generation=manifest.generation)
        self.newest = Snapshot(path, manifest, self.files)
        return self.newest

    def keep(self, manifest: Manifest, tensors: Mapping[str, TensorCopy]) -> Snapshot | None:
        """Write a snapshot of one's own, and remove older ones and the journal before them.

        Returns ``None`` if the primary has sent another model meanwhile, or a snapshot that is as new. Raises
        :class:`StorageError`.
        """
        try:
            manifest = snapshots.prepare(self.files, self._snapshots, manifest, tensors)
            with self._changing:
                newest = self.newest
                if newest is None or not _is_behind(manifest, newest.manifest):
                    snapshots.abandon(self.files, self._snapshots, manifest)
                    return None
                snapshot = snapshots.commit(self.files, self._snapshots, manifest)
                self._lock_file.note(snapshot=manifest.segment, generation=manifest.generation)
                self.newest = snapshot
                kept = snapshots.prune(self.files, self._snapshots, self._settings.keep_snapshots)
                first = min(each.manifest.segment for each in kept)
                remove_segments_before(self.files, self._journals, first)
                return snapshot
        except OSError as error:
            raise StorageError(f"cannot write a snapshot to {self._snapshots}: {error.strerror or error}") from error

    def reader(self, segment: int) -> SegmentReader:
        """Return a reader of a segment."""
        return SegmentReader(segment_path(self._journals, segment), self.files)

    def note_promoted(self) -> None:
        """Write down that a server serves from here from now on; raises :class:`StorageError`."""
        self._mark_directory(PROMOTED_NAME)

    def note_ahead(self) -> None:
        """Write down that the primary has come back with less than is here; raises :class:`StorageError`."""
        self.is_ahead = True
        self._mark_directory(AHEAD_NAME)

    def _mark_directory(self, name: str) -> None:
        try:
            self.files.write(self.path / name, b"")
            self.files.sync(self.path)
        except OSError as error:
            raise StorageError(f"cannot write to {self.path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Force the journal to the disk, and free the directory."""
        try:
            self._sync_end()
        except OSError as error:
            log.error("the end of the journal may not be on the disk", extra={"error": str(error)})
        if self._file is not None:
            self._file.close()
        self._lock_file.close()


def _is_behind(manifest: Manifest, newest: Manifest) -> bool:
    """Tell whether a snapshot goes on from the newest one."""
    return manifest.generation == newest.generation and manifest.segment > newest.segment


class _Pieces:
    """Pieces of bytes, read in other portions than they come in; raises :class:`StorageError` if they end early."""

    def __init__(self, data: Iterable[bytes]) -> None:
        self._data, self._rest, self.manifest = iter(data), b"", b""

    def exactly(self, size: int) -> bytes:
        """Return so many bytes, which are the manifest."""
        self.manifest = b"".join(self.up_to(size))
        return self.manifest

    def up_to(self, size: int) -> Iterator[bytes]:
        """Yield so many bytes."""
        while size:
            piece = self._rest or next(self._data, b"")
            if not piece:
                raise StorageError("a snapshot has ended early")
            taken, self._rest = piece[:size], piece[size:]
            size -= len(taken)
            yield taken


def _manifest(data: bytes, settings: ServerSettings) -> Manifest:
    """Read the manifest of a snapshot that has come; raises :class:`StorageError`."""
    manifest = Manifest.from_bytes(data, f"the primary's {MANIFEST_NAME}")
    mine = settings.shard_index, settings.num_shards
    if (manifest.shard_index, manifest.num_shards) != mine:
        raise StorageError(
            f"the snapshot is of shard {manifest.shard_index} of {manifest.num_shards}, this standby is of shard "
            f"{mine[0]} of {mine[1]}"
        )
    return manifest

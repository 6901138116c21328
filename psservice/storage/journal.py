"""The journal: records since the last snapshot, each appended before its acknowledgement, and read after a crash.

One thread at a time appends. Many wait for durability: the first of them forces to the disk what all have appended
(group commit). The kernel has a record when :meth:`Journal.append` returns, so the death of the process loses nothing
in any mode.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from isal.isal_zlib import crc32

from psservice.storage.environment import Environment
from psservice.storage.files import DISK, Files, StorageError
from psservice.storage.journal_format import (
    FRAME,
    HEAD_BYTES,
    MARK_BYTES,
    Body,
    DamagedError,
    Record,
    frame,
    is_left_empty,
    read_mark,
    record_crc,
    segment_head,
)
from psservice.storage.lock_file import LockFile

log = logging.getLogger(__name__)

_SUFFIX = ".journal"
_LOG_SECONDS = 60.0  # between two log lines about records that cannot be written
_SEARCH_BYTES = 1 << 20


class Position(NamedTuple):
    """A place in the journal: the bytes of a segment before ``offset``, and all segments before. Positions compare."""

    segment: int = 0
    offset: int = 0


def segment_path(directory: Path, number: int) -> Path:
    """Return the file of a segment."""
    return directory / f"{number:012d}{_SUFFIX}"


def segment_numbers(files: Files, directory: Path) -> list[int]:
    """Return the numbers of the segments that are there, ascending."""
    stems = (name.removesuffix(_SUFFIX) for name in files.list(directory) if name.endswith(_SUFFIX))
    return sorted(int(stem) for stem in stems if stem.isdigit())


def remove_segments_before(files: Files, directory: Path, number: int) -> None:
    """Remove the segments before one; a segment that cannot be removed stays for the next time."""
    for old in segment_numbers(files, directory):
        if old < number:
            try:
                files.remove(segment_path(directory, old))
            except OSError as error:
                log.warning("old segment stays", extra={"segment": old, "error": str(error)})


class Journal:
    """Appends records to numbered segments; raises ``OSError`` if the first segment cannot be begun.

    Every method but :meth:`cut_before` raises :class:`StorageError` if a record cannot be made durable.

    Args:
        number: of the first segment; its file must not exist.
        on_health: called after each change of ``healthy``, by a thread that owns no lock of the journal.
        lock_file: its watermark is moved before an append or a wait returns; ``None`` for a journal without one.

    Attributes:
        errors: failed attempts to write or to force to the disk, so far.
        healthy: whether the last record could be written, and nothing is broken.
        waits: whether each record is forced to the disk before its event is told of.
        broken: why the contents of the disk are unknown, so that only a restart, which reads them, helps; else empty.
    """

    def __init__(
        self,
        environment: Environment,
        directory: Path,
        number: int,
        fsync: str,
        interval_seconds: float,
        on_health: Callable[[], None] = lambda: None,
        lock_file: LockFile | None = None,
    ) -> None:
        self._environment, self._files, self._directory = environment, environment.files, directory
        self._fsync, self._interval_seconds = fsync, interval_seconds
        self.waits = fsync == "always"
        self._on_health, self._lock_file = on_health, lock_file
        self.bytes_written = self.errors = 0
        self.broken, self.healthy = "", True
        self._complained, self._complained_at = False, -_LOG_SECONDS
        self._untold: deque[Callable[[], None]] = deque()  # log lines and calls of on_health, for when no lock is owned
        self._forcing = threading.Lock()  # during an fsync and while the file changes; acquired before the other
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._open_segment(number)
        self._thread = environment.start(self._force_at_intervals, "journal") if fsync == "interval" else None

    def append(self, kind: int, body: Body) -> None:
        """Write one record, or leave the journal as before."""
        try:
            with self._lock:
                self._append(kind, body)
        finally:
            if self._untold:
                self._tell()

    def wait(self) -> None:
        """Wait until every record that was appended before this call is as durable as the mode promises."""
        if self.waits:
            self.force()

    def force(self) -> None:
        """Force every record that was appended before this call to the disk."""
        with self._lock:
            target = (self._number, self._size)
        try:
            with self._forcing:
                # Else another call, or the end of a segment, has done that.
                if (self._number, self._size_durable) < target:
                    self._sync()
        finally:
            self._tell()

    def rotate(self) -> int:
        """End the segment and begin the next; return its number."""
        try:
            with self._forcing, self._lock:
                return self._rotate()
        finally:
            self._tell()

    def cut_before(self, number: int) -> None:
        """Remove the segments before one; a segment that cannot be removed stays for the next time."""
        remove_segments_before(self._files, self._directory, number)

    @property
    def path(self) -> Path:
        """The file of the segment that is appended to."""
        return self._path

    @property
    def position(self) -> Position:
        """The end of the last record; any thread may ask, and waits for no disk."""
        return self._end

    def give_up(self, why: str) -> None:
        """Refuse every later record: what is appended would be lost."""
        try:
            with self._lock:
                if not self.broken:
                    self._break(why)
        finally:
            self._tell()

    def close(self) -> None:
        """Force the rest to the disk (unless never) and close the file."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        with self._forcing, self._lock:
            if self._fsync != "never" and not self.broken:
                with suppress(StorageError):  # logged
                    self._sync()
            self.broken = "the journal is closed"
            self._file.close()
        self._tell()

    def _force_at_intervals(self) -> None:
        while not self._closing.wait(self._interval_seconds) and not self.broken:
            with suppress(StorageError):  # logged
                self.force()

    def _sync(self) -> None:
        """Force the segment to the disk; under ``_forcing``, so that no thread closes the file."""
        with self._lock:
            self._require_whole()
            size = self._size
        try:
            self._file.sync()
            with self._lock:
                self._note_progress(self._number, self._size, size)
                self._size_durable = size
        except OSError as error:
            with self._lock:
                self._break(f"fsync of {self._path}: {error.strerror}")
                raise StorageError(self.broken) from error

    def _tell(self) -> None:
        """Log and report what has changed; the caller owns no lock.

        Whoever is called may wait for a thread that is about to append.
        """
        while self._untold:
            try:
                call = self._untold.popleft()
            except IndexError:  # another thread tells it
                return
            call()

    # Under the lock

    def _append(self, kind: int, body: Body) -> None:
        self._require_whole()
        parts = [frame(self._mark, kind, body), *body.parts]
        size = sum(map(len, parts))
        try:
            self._file.append(parts)
            self._note_progress(self._number, self._size + size, self._size_durable)
        except OSError as error:
            self.errors += 1
            self._set_healthy(False, error.strerror or str(error))
            try:
                self._file.cut(self._size)
            except OSError:
                self._break(f"a record is half written to {self._path} and cannot be cut off: {error.strerror}")
            raise StorageError(
                f"cannot append to {self._path}: {error.strerror}; free space or mend the disk, "
                "pushes are taken again as soon as it can be written"
            ) from error
        self._size += size
        self._end = Position(self._number, self._size)
        self.bytes_written += size
        if self._complained or not self.healthy:
            self._set_healthy(True)

    def _note_progress(self, segment: int, appended: int, durable: int) -> None:
        if self._lock_file is not None:
            self._lock_file.note(segment=segment, appended=appended, durable=durable)

    def _rotate(self) -> int:
        self._require_whole()
        if self._fsync != "never":  # first: a torn tail with another segment behind it would be taken for damage
            self._sync()
        old = self._file
        try:
            self._open_segment(self._number + 1)
        except OSError as error:
            self.errors += 1
            raise StorageError(f"cannot begin a segment of the journal: {error.strerror}") from error
        old.close()
        return self._number

    def _open_segment(self, number: int) -> None:
        """Create a segment, and write to it from now on; raises ``OSError``, and then nothing has changed."""
        path, mark = segment_path(self._directory, number), self._environment.random_bytes(MARK_BYTES)
        file = self._files.open_new(path)
        try:
            file.append([segment_head(mark)])
            durable = 0
            if self._fsync != "never":
                file.sync()
                self._files.sync(self._directory)
                durable = HEAD_BYTES
            self._note_progress(number, HEAD_BYTES, durable)
        except BaseException:
            file.close()
            self._files.remove(path)
            raise
        self._file, self._path, self._mark, self._number = file, path, mark, number
        self._size, self._size_durable = HEAD_BYTES, durable
        self._end = Position(number, HEAD_BYTES)

    def _break(self, why: str) -> None:
        self.broken = f"{why}; restart the server to recover what is on the disk"
        self._untold.append(partial(log.error, "journal broken", extra={"error": self.broken}))
        self.errors += 1
        self._complained = True
        self._set_healthy(False)

    def _require_whole(self) -> None:
        if self.broken:
            raise StorageError(self.broken)

    def _set_healthy(self, healthy: bool, why: str = "") -> None:
        """Note a change, for :meth:`_tell`; log at most once a minute.

        On a nearly full disk the health flips with each record's size.
        """
        now = self._environment.monotonic()
        if healthy and self._complained:
            self._untold.append(partial(log.warning, "records can be written down again: pushes are taken"))
            self._complained = False
        elif not healthy and not self._complained and now - self._complained_at >= _LOG_SECONDS:
            said = partial(log.error, "records cannot be written down: pushes are refused", extra={"error": why})
            self._untold.append(said)
            self._complained, self._complained_at = True, now
        if healthy != self.healthy:
            self.healthy = healthy
            self._untold.append(self._on_health)


class SegmentReader:
    """Reads one segment.

    Attributes:
        valid_bytes: up to the end of the last record that was read.
        torn: why reading ended before the end of the file; ``None`` if it did not.
    """

    def __init__(self, path: Path, files: Files = DISK) -> None:
        self.path, self._files = path, files
        self.valid_bytes = 0
        self.torn: str | None = None
        self._size, self._mark = 0, b""

    def records(self) -> Iterator[Record]:
        """Yield the records up to the end or a torn tail.

        Raises :class:`DamagedError` if others follow a record that does not check, ``OtherReleaseError`` if the
        file has another form, :class:`StorageError` if it cannot be read: a running server may have removed it.
        """
        try:
            file = self._files.open(self.path)
        except OSError as error:
            raise StorageError(f"cannot read {self.path}: {error.strerror}") from error
        with file:
            head = self._read_head(file)
            if is_left_empty(head, self._size):
                self.valid_bytes = self._size
                return
            if not self._has_mark(head):
                if self._size > HEAD_BYTES:
                    raise DamagedError(self.path, 0, "its head does not check")
                cut = self._size < HEAD_BYTES
                self.torn = "the file ends inside its head" if cut else "its head does not check"
                return
            self.valid_bytes = HEAD_BYTES
            while self.valid_bytes < self._size:
                record = self._read(file, self.valid_bytes)
                if isinstance(record, str):
                    following = self._next_record(file)
                    if following is not None:
                        why = f"{record}, and there is a record at {following.offset}"
                        raise DamagedError(self.path, self.valid_bytes, why)
                    self.torn = record
                    return
                yield record
                self.valid_bytes = record.end

    def salvage(self) -> Iterator[Record]:
        """Yield the whole records behind the last record that was read; none if there is no file."""
        with suppress(OSError), self._files.open(self.path) as file:
            if self._has_mark(self._read_head(file)):
                while (record := self._next_record(file)) is not None:
                    yield record
                    self.valid_bytes = record.end - 1

    def _read_head(self, file: BinaryIO) -> bytes:
        self._size = file.seek(0, 2)
        file.seek(0)
        return file.read(HEAD_BYTES)

    def _has_mark(self, head: bytes) -> bool:
        """Learn the segment's mark; tell whether the head checks."""
        mark = read_mark(self.path, head)
        self._mark = mark or b""
        return mark is not None

    def _read(self, file: BinaryIO, offset: int) -> Record | str:
        """Return the record at a position, or its fault."""
        file.seek(offset)
        data = file.read(FRAME.size)
        if len(data) < FRAME.size:
            return "the file ends inside the head of a record"
        mark, length, kind, crc = FRAME.unpack(data)
        if mark != self._mark:
            return "there is no record where one should begin"
        end = offset + FRAME.size + length
        if end > self._size:  # before anything is allocated
            return f"a record of {length} bytes is cut by the end of the file"
        body = file.read(length)
        if record_crc(length, kind, crc32(body)) != crc:
            return f"the checksum of a record of {length} bytes does not hold"
        return Record(kind, body, offset, end)

    def _next_record(self, file: BinaryIO) -> Record | None:
        """Search for a whole record behind the last one that was read."""
        position = self.valid_bytes + 1
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

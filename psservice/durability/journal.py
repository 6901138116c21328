"""The journal: what was acknowledged since the last snapshot, appended before it is acknowledged.

Whoever appends is one thread at a time (the shard's writer, or under the journal's own lock); whoever waits for
durability are many: one ``fsync`` serves all that wait (group commit). A record is in the kernel's hands when
:meth:`Journal.append` returns, so the death of the process loses nothing in any mode.
"""

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from psservice.durability.files import StorageError, sync_directory
from psservice.durability.records import HEAD_BYTES, MAGIC, Body, frame, new_head

log = logging.getLogger(__name__)

FsyncMode = Literal["always", "interval", "never"]

SEGMENT_SUFFIX = ".journal"
_MOST_PARTS = 512  # of one writev; Linux takes 1024


class JournalError(StorageError):
    """A record could not be made durable.

    Attributes:
        final: True where only a restart helps: after a failed ``fsync`` nobody knows what is on the disk.
    """

    def __init__(self, message: str, *, final: bool) -> None:
        """Say what failed."""
        super().__init__(message)
        self.final = final


def segment_path(directory: Path, number: int) -> Path:
    """Return the file of a segment."""
    return directory / f"{number:012d}{SEGMENT_SUFFIX}"


def segment_numbers(directory: Path) -> list[int]:
    """Return the numbers of the segments that are there, ascending."""
    return sorted(int(path.stem) for path in directory.glob(f"*{SEGMENT_SUFFIX}") if path.stem.isdigit())


class Journal:
    """Appends records to numbered segments.

    Args:
        directory: exists, and is this process's own.
        number: of the first segment; its file must not exist.
        fsync: when what was appended is forced to the disk.
        interval_seconds: between two of these, in that mode.
        on_health: told ``False`` when a record could not be written, ``True`` when one can be again.

    Attributes:
        bytes_written: appended so far.
        errors: failed attempts to write or to force to the disk, so far.
    """

    def __init__(
        self,
        directory: Path,
        number: int,
        fsync: FsyncMode,
        interval_seconds: float,
        on_health: Callable[[bool], None] = lambda healthy: None,
    ) -> None:
        """Begin a segment."""
        self.directory = directory
        self.number = number
        self.bytes_written = 0
        self.errors = 0
        self._fsync, self._interval_seconds, self._on_health = fsync, interval_seconds, on_health
        self._healthy = True
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._appended = self._durable = self._wanted = 0  # records, over all segments; one taken back counts too
        self._last_size = 0
        self._broken: str | None = None
        self._closing = False
        self._descriptor, self._path, self._mark, self._size = self._open_segment()
        self._thread = threading.Thread(target=self._flush, name="journal", daemon=True)
        if fsync != "never":
            self._thread.start()

    @property
    def is_broken(self) -> bool:
        """Whether nobody knows what is on the disk, so that only a restart, which reads it, helps."""
        return self._broken is not None

    def append(self, kind: int, body: Body) -> int:
        """Write one record; return its number, for :meth:`take_back`.

        Raises:
            JournalError: it could not be written; the journal is as it was before.
        """
        with self._lock:
            self._require_whole()
            parts = [frame(self._mark, kind, body), *body.parts]
            size = sum(map(len, parts))
            try:
                _write_all(self._descriptor, parts)
            except OSError as error:
                self._undo(error)
                raise JournalError(
                    f"cannot append to {self._path}: {error.strerror}; free space or mend the disk, "
                    "pushes are taken again as soon as it can be written",
                    final=False,
                ) from error
            self._size += size
            self._last_size = size
            self._appended += 1
            self.bytes_written += size
            self._set_healthy(True)
            return self._appended

    def take_back(self, number: int) -> None:
        """Undo the last :meth:`append`, which returned ``number``; nothing was appended since.

        Raises:
            JournalError: it cannot be undone.
        """
        with self._lock:
            assert number == self._appended, "only the last record can be taken back"
            assert self._last_size, "a record can be taken back once"
            try:
                os.ftruncate(self._descriptor, self._size - self._last_size)
            except OSError as error:
                self._break(f"cannot cut {self._path}: {error.strerror}")
                raise JournalError(str(self._broken), final=True) from error
            self._size -= self._last_size
            self._last_size = 0

    def wait(self) -> None:
        """Wait until every record that was appended before this call is as durable as the mode promises.

        Raises:
            JournalError: it could not be made durable.
        """
        if self._fsync != "always":
            return
        with self._changed:
            number = self._appended
            self._wanted = max(self._wanted, number)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._durable >= number or self._broken is not None)
            if self._durable < number:
                raise JournalError(str(self._broken), final=True)

    def rotate(self) -> int:
        """End the segment and begin the next; return its number.

        Raises:
            JournalError: it cannot be begun; the old one goes on.
        """
        with self._lock:
            self._require_whole()
            old = self._descriptor
            try:  # first: a torn tail with another segment behind it would be taken for damage
                if self._fsync != "never":
                    os.fsync(old)
                    self._durable = self._appended
                    self._changed.notify_all()
            except OSError as error:
                self._break(f"fsync of {self._path}: {error.strerror}")
                raise JournalError(str(self._broken), final=True) from error
            self.number += 1
            try:
                self._descriptor, self._path, self._mark, self._size = self._open_segment()
            except OSError as error:
                self.number -= 1
                self.errors += 1
                raise JournalError(f"cannot begin a segment of the journal: {error.strerror}", final=False) from error
            os.close(old)
            return self.number

    def cut_before(self, number: int) -> None:
        """Remove the segments before one; what cannot be removed stays and is tried again the next time."""
        for old in segment_numbers(self.directory):
            if old < number:
                try:
                    segment_path(self.directory, old).unlink(missing_ok=True)
                except OSError as error:
                    log.warning("old segment stays", extra={"segment": old, "error": str(error)})

    def close(self) -> None:
        """Force what is left to the disk (unless never) and close the file."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        with self._lock:
            try:
                if self._fsync != "never" and self._broken is None:
                    os.fsync(self._descriptor)
                    self._durable = self._appended
            except OSError as error:
                self._break(f"fsync of {self._path}: {error.strerror}")
            self._broken = self._broken or "the journal is closed"
            self._changed.notify_all()
            os.close(self._descriptor)

    # Inner parts; the lock is held

    def _open_segment(self) -> tuple[int, Path, bytes, int]:
        """Create the segment; return its descriptor, its file, its mark and its size."""
        path, head = segment_path(self.directory, self.number), new_head()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            _write_all(descriptor, [head])
            if self._fsync != "never":
                os.fsync(descriptor)
                sync_directory(self.directory)
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        return descriptor, path, head[len(MAGIC) :], HEAD_BYTES

    def _undo(self, error: OSError) -> None:
        self.errors += 1
        self._set_healthy(False)
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError:
            self._break(f"a record is half written to {self._path} and cannot be cut off: {error.strerror}")

    def _break(self, why: str) -> None:
        self._broken = f"{why}; restart the server to recover what is on the disk"
        log.error("journal broken", extra={"error": self._broken})
        self.errors += 1
        self._set_healthy(False)
        self._changed.notify_all()

    def _require_whole(self) -> None:
        if self._broken is not None:
            raise JournalError(self._broken, final=True)

    def _set_healthy(self, healthy: bool) -> None:
        if healthy != self._healthy:
            self._healthy = healthy
            self._on_health(healthy)

    def _flush(self) -> None:
        """Force to the disk whatever is waited for; in the interval mode, whatever is there."""
        while True:
            with self._changed:
                if self._fsync == "always":
                    self._changed.wait_for(lambda: self._closing or self._wanted > self._durable)
                else:
                    self._changed.wait_for(lambda: self._closing, timeout=self._interval_seconds)
                if self._closing:
                    return
                if self._durable >= self._appended or self._broken is not None:
                    self._wanted = self._durable
                    continue
                number, path = self._appended, self._path
                descriptor = os.dup(self._descriptor)  # a rotation may close it meanwhile
            try:
                os.fdatasync(descriptor)
            except OSError as error:
                with self._changed:
                    self._break(f"fsync of {path}: {error.strerror}")
                continue
            finally:
                os.close(descriptor)
            with self._changed:
                self._durable = max(self._durable, number)
                self._changed.notify_all()


def _write_all(descriptor: int, parts: list[bytes]) -> None:
    """Write every byte, or raise ``OSError``."""
    views = [memoryview(part) for part in parts if part]
    while views:
        written = os.writev(descriptor, views[:_MOST_PARTS])
        while views and written >= len(views[0]):
            written -= len(views[0])
            views.pop(0)
        if views and written:
            views[0] = views[0][written:]

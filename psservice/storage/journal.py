"""The journal: what was acknowledged since the last snapshot, appended before it is acknowledged.

Whoever appends is one thread at a time (the shard's writer, or under the journal's own lock); whoever waits for
durability are many: one ``fsync`` serves all that wait (group commit). A record is in the kernel's hands when
:meth:`Journal.append` returns, so the death of the process loses nothing in any mode.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from psservice.storage.files import StorageError, sync_directory
from psservice.storage.journal_format import HEAD_BYTES, Body, frame, new_head

log = logging.getLogger(__name__)

FsyncMode = Literal["always", "interval", "never"]

SEGMENT_SUFFIX = ".journal"
_MOST_PARTS = 512  # of one writev; Linux takes 1024
_QUIET_SECONDS = 60.0  # between two lines that say that records cannot be written


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
        on_reach: told, before an append or a wait returns, of the newest segment's number, of its bytes up to the end
            of the last record, and of those that were forced to the disk. May raise ``OSError``.

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
        on_reach: Callable[[int, int, int], None] = lambda number, appended, durable: None,
    ) -> None:
        """Begin a segment; raises ``OSError``."""
        self.directory = directory
        self.number = number
        self.bytes_written = 0
        self.errors = 0
        self._fsync, self._interval_seconds = fsync, interval_seconds
        self._on_health, self._on_reach = on_health, on_reach
        self._healthy = True
        self._complained = False
        self._complained_at = -_QUIET_SECONDS
        self._forcing = threading.Lock()  # held during an fsync, and while the descriptor changes; before the other
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._appended = self._durable = self._wanted = 0  # records, over all segments
        self._broken: str | None = None
        self._closing = False
        self._open_segment()
        self._thread = threading.Thread(target=self._flush, name="journal", daemon=True)
        if fsync != "never":
            self._thread.start()

    @property
    def is_broken(self) -> bool:
        """Whether nobody knows what is on the disk, so that only a restart, which reads it, helps."""
        return self._broken is not None

    def append(self, kind: int, body: Body) -> None:
        """Write one record.

        Raises:
            JournalError: it could not be written; the journal is as it was before.
        """
        with self._lock:
            self._require_whole()
            parts = [frame(self._mark, kind, body), *body.parts]
            size = sum(map(len, parts))
            try:
                _write_all(self._descriptor, parts)
                self._on_reach(self.number, self._size + size, self._durable_size)
            except OSError as error:
                self._undo(error)
                raise JournalError(
                    f"cannot append to {self._path}: {error.strerror}; free space or mend the disk, "
                    "pushes are taken again as soon as it can be written",
                    final=False,
                ) from error
            self._size += size
            self._appended += 1
            self.bytes_written += size
            self._set_healthy(True)

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
        with self._forcing, self._lock:
            self._require_whole()
            old = self._descriptor
            try:  # first: a torn tail with another segment behind it would be taken for damage
                if self._fsync != "never":
                    os.fsync(old)
                    self._now_durable(self._appended, self._size)
            except OSError as error:
                self._break(f"fsync of {self._path}: {error.strerror}")
                raise JournalError(str(self._broken), final=True) from error
            self.number += 1
            try:
                self._open_segment()
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
                    self._now_durable(self._appended, self._size)
            except OSError as error:
                self._break(f"fsync of {self._path}: {error.strerror}")
            self._broken = self._broken or "the journal is closed"
            self._changed.notify_all()
            os.close(self._descriptor)

    # Inner parts; the lock is held

    def _open_segment(self) -> None:
        """Create the segment, and write to it from now on; raises ``OSError``, and then nothing has changed."""
        path, (head, mark) = segment_path(self.directory, self.number), new_head()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            _write_all(descriptor, [head])
            durable = 0
            if self._fsync != "never":
                os.fsync(descriptor)
                sync_directory(self.directory)
                durable = HEAD_BYTES
            self._on_reach(self.number, HEAD_BYTES, durable)
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        self._descriptor, self._path, self._mark = descriptor, path, mark
        self._size, self._durable_size = HEAD_BYTES, durable

    def _now_durable(self, records: int, size: int) -> None:
        """Let those go that wait for so many records; so much of the segment is on the disk. May raise ``OSError``."""
        self._durable, self._durable_size = max(self._durable, records), max(self._durable_size, size)
        self._on_reach(self.number, self._size, self._durable_size)
        self._changed.notify_all()

    def _undo(self, error: OSError) -> None:
        self.errors += 1
        self._set_healthy(False, error.strerror or str(error))
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError:
            self._break(f"a record is half written to {self._path} and cannot be cut off: {error.strerror}")

    def _break(self, why: str) -> None:
        self._broken = f"{why}; restart the server to recover what is on the disk"
        log.error("journal broken", extra={"error": self._broken})
        self.errors += 1
        self._complained = True
        self._set_healthy(False)
        self._changed.notify_all()

    def _require_whole(self) -> None:
        if self._broken is not None:
            raise JournalError(self._broken, final=True)

    def _set_healthy(self, healthy: bool, why: str = "") -> None:
        """Tell of a change, and log it once in a while: a small record may fit where the next one does not."""
        if healthy and self._complained:
            log.warning("records can be written down again: pushes are taken")
            self._complained = False
        elif not healthy and not self._complained and time.monotonic() - self._complained_at >= _QUIET_SECONDS:
            log.error("records cannot be written down: pushes are refused", extra={"error": why})
            self._complained, self._complained_at = True, time.monotonic()
        if healthy != self._healthy:
            self._healthy = healthy
            self._on_health(healthy)

    # The thread

    def _flush(self) -> None:
        """Force to the disk whatever is waited for; in the interval mode, whatever is there."""
        while self._await_work():
            try:
                with self._forcing:  # so nobody closes the descriptor
                    with self._lock:
                        records, size = self._appended, self._size
                    os.fdatasync(self._descriptor)
                    with self._lock:
                        self._now_durable(records, size)
            except OSError as error:
                with self._lock:
                    self._break(f"fsync of {self._path}: {error.strerror}")

    def _await_work(self) -> bool:
        """Wait until something is to be forced to the disk; ``False`` where the journal is closed, or broken."""
        while True:
            with self._changed:
                if self._fsync == "always":
                    self._changed.wait_for(lambda: self._closing or self._wanted > self._durable)
                else:
                    self._changed.wait_for(lambda: self._closing, timeout=self._interval_seconds)
                if self._closing or self._broken is not None:
                    return False
                if self._appended > self._durable:
                    return True


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

"""The journal: what was acknowledged since the last snapshot, appended before it is acknowledged.

One thread at a time appends. Many wait for durability: the first of them forces to the disk what all have appended
(group commit). A record is in the kernel's hands when :meth:`Journal.append` returns, so the death of the process
loses nothing in any mode.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from psservice.storage.environment import Environment
from psservice.storage.files import Files, StorageError
from psservice.storage.journal_format import HEAD_BYTES, MARK_BYTES, Body, frame, head_with

log = logging.getLogger(__name__)

FsyncMode = Literal["always", "interval", "never"]

SEGMENT_SUFFIX = ".journal"
_QUIET_SECONDS = 60.0  # between two lines that say that records cannot be written


class JournalError(StorageError):
    """A record could not be made durable."""


def segment_path(directory: Path, number: int) -> Path:
    """Return the file of a segment."""
    return directory / f"{number:012d}{SEGMENT_SUFFIX}"


def segment_numbers(files: Files, directory: Path) -> list[int]:
    """Return the numbers of the segments that are there, ascending."""
    stems = (name.removesuffix(SEGMENT_SUFFIX) for name in files.list(directory) if name.endswith(SEGMENT_SUFFIX))
    return sorted(int(stem) for stem in stems if stem.isdigit())


class Journal:
    """Appends records to numbered segments.

    Args:
        number: of the first segment; its file must not exist.
        on_health: told ``False`` when a record could not be written, ``True`` when one can be again.
        on_reach: told, before an append or a wait returns, of the newest segment's number, of its bytes up to the end
            of the last record, and of those that were forced to the disk. May raise ``OSError``.

    Attributes:
        errors: failed attempts to write or to force to the disk, so far.

    Raises:
        OSError: the segment cannot be begun.
    """

    def __init__(
        self,
        environment: Environment,
        directory: Path,
        number: int,
        fsync: FsyncMode,
        interval_seconds: float,
        on_health: Callable[[bool], None] = lambda healthy: None,
        on_reach: Callable[[int, int, int], None] = lambda number, appended, durable: None,
    ) -> None:
        self._environment, self._files = environment, environment.files
        self.directory = directory
        self.number = number
        self.bytes_written = 0
        self.errors = 0
        self._fsync, self._interval_seconds = fsync, interval_seconds
        self._on_health, self._on_reach = on_health, on_reach
        self._healthy = True
        self._complained = False
        self._complained_at = -_QUIET_SECONDS
        self._forcing = threading.Lock()  # during an fsync and while the file changes; acquired before the other
        self._lock = threading.RLock()
        self._bytes_durable = 0  # of bytes_written
        self._broken: str | None = None
        self._closing = threading.Event()
        self._open_segment()
        self._thread = environment.start(self._force_at_intervals, "journal") if fsync == "interval" else None

    @property
    def is_broken(self) -> bool:
        """Whether nobody knows what is on the disk, so that only a restart, which reads it, helps."""
        return self._broken is not None

    def append(self, kind: int, body: Body) -> None:
        """Write one record, or raise :class:`JournalError` with the journal as before."""
        with self._lock:
            self._require_whole()
            parts = [frame(self._mark, kind, body), *body.parts]
            size = sum(map(len, parts))
            try:
                self._file.append(parts)
                self._on_reach(self.number, self._size + size, self._size_durable)
            except OSError as error:
                self._undo_last(error)
                raise JournalError(
                    f"cannot append to {self._path}: {error.strerror}; free space or mend the disk, "
                    "pushes are taken again as soon as it can be written"
                ) from error
            self._size += size
            self.bytes_written += size
            self._set_healthy(True)

    def wait(self) -> None:
        """Wait until every record that was appended before this call is as durable as the mode promises."""
        if self._fsync == "always":
            self.force()

    def force(self) -> None:
        """Force every record that was appended before this call to the disk; raises :class:`JournalError`."""
        with self._lock:
            target = self.bytes_written
        with self._forcing:
            if self._bytes_durable < target:
                self._sync()

    def rotate(self) -> int:
        """End the segment and begin the next, or raise :class:`JournalError`; return the newest one's number."""
        with self._forcing, self._lock:
            self._require_whole()
            if self._fsync != "never":  # first: a torn tail with another segment behind it would be taken for damage
                self._sync()
            old = self._file
            self.number += 1
            try:
                self._open_segment()
            except OSError as error:
                self.number -= 1
                self.errors += 1
                raise JournalError(f"cannot begin a segment of the journal: {error.strerror}") from error
            old.close()
            return self.number

    def cut_before(self, number: int) -> None:
        """Remove the segments before one; a segment that cannot be removed stays for the next time."""
        for old in segment_numbers(self._files, self.directory):
            if old < number:
                try:
                    self._files.remove(segment_path(self.directory, old))
                except OSError as error:
                    log.warning("old segment stays", extra={"segment": old, "error": str(error)})

    def close(self) -> None:
        """Force the rest to the disk (unless never) and close the file."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        with self._forcing, self._lock:
            if self._broken == _CLOSED:
                return
            if self._fsync != "never" and self._broken is None:
                with suppress(JournalError):  # logged
                    self._sync()
            self._broken = _CLOSED
            self._file.close()

    def _force_at_intervals(self) -> None:
        while not self._closing.wait(self._interval_seconds) and not self.is_broken:
            with suppress(JournalError):  # logged
                self.force()

    def _sync(self) -> None:
        """Force the segment to the disk; ``_forcing`` is held, so nobody closes the file."""
        with self._lock:
            self._require_whole()
            written, size = self.bytes_written, self._size
        try:
            self._file.sync()
            with self._lock:
                self._on_reach(self.number, self._size, size)
                self._bytes_durable, self._size_durable = written, size
        except OSError as error:
            with self._lock:
                self._break(f"fsync of {self._path}: {error.strerror}")
                raise JournalError(str(self._broken)) from error

    # The lock is held

    def _open_segment(self) -> None:
        """Create the segment, and write to it from now on; raises ``OSError``, and then nothing has changed."""
        path, mark = segment_path(self.directory, self.number), self._environment.random_bytes(MARK_BYTES)
        file = self._files.open_new(path)
        try:
            file.append([head_with(mark)])
            durable = 0
            if self._fsync != "never":
                file.sync()
                self._files.sync(self.directory)
                durable = HEAD_BYTES
            self._on_reach(self.number, HEAD_BYTES, durable)
        except BaseException:
            file.close()
            self._files.remove(path)
            raise
        self._file, self._path, self._mark = file, path, mark
        self._size, self._size_durable = HEAD_BYTES, durable

    def _undo_last(self, error: OSError) -> None:
        self.errors += 1
        self._set_healthy(False, error.strerror or str(error))
        try:
            self._file.cut(self._size)
        except OSError:
            self._break(f"a record is half written to {self._path} and cannot be cut off: {error.strerror}")

    def _break(self, why: str) -> None:
        self._broken = f"{why}; restart the server to recover what is on the disk"
        log.error("journal broken", extra={"error": self._broken})
        self.errors += 1
        self._complained = True
        self._set_healthy(False)

    def _require_whole(self) -> None:
        if self._broken is not None:
            raise JournalError(self._broken)

    def _set_healthy(self, healthy: bool, why: str = "") -> None:
        """Tell of a change, and log it once in a while: a small record may fit where the next one does not."""
        now = self._environment.monotonic()
        if healthy and self._complained:
            log.warning("records can be written down again: pushes are taken")
            self._complained = False
        elif not healthy and not self._complained and now - self._complained_at >= _QUIET_SECONDS:
            log.error("records cannot be written down: pushes are refused", extra={"error": why})
            self._complained, self._complained_at = True, now
        if healthy != self._healthy:
            self._healthy = healthy
            self._on_health(healthy)


_CLOSED = "the journal is closed"

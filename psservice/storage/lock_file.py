"""The file ``lock``: which process has a directory, and how far the contents were acknowledged.

The journal alone cannot tell an unfinished record from one that was cut off, and a missing file leaves no trace. So
the lock names the least that must be there. One ``pwrite`` of fewer bytes than a sector changes the file, so the death
of a process leaves the old content or the new one. Not every change is forced to the disk: after a power cut
the file may lag behind the journal. Recovery then demands less than was really acknowledged, never more.

The file also names its own place on the disk. A copy has another place, which is how a start notices that the directory
is a copy: the server of the original may have gone on after the copy was made.
"""

import struct
import threading
import zlib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from psservice.storage.files import UNKNOWN_PLACE, Files, Place, StorageError
from psservice.storage.formats import require_mark

LOCK_NAME = "lock"

STANDBY = "standby"
"""Stands in the lock for the mode of fsync: the directory is a standby's, and another server acknowledges."""

_MAGIC = b"SPSLOCK3"
_FORM = struct.Struct("<8s36s8sQQQQQ?QQ")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Watermark:
    """How far a directory was acknowledged, and under which promise.

    Attributes:
        boot_id: of the machine's start in which ``appended`` holds; empty if that is not known.
        fsync: mode of the journal; empty if no journal is kept.
        segment: number of the journal's newest segment; 0 for none.
        appended: its bytes up to the end of the last record; they survive the death of the process.
        durable: its bytes that were forced to the disk; they survive the death of the machine.
        snapshot: segment in the name of the newest snapshot; 0 for none.
        generation: of the model in it.
        clean: whether that snapshot was the last act of a life that was told to stop, and no life has begun since.
        place: of the lock file in which this was written.
    """

    boot_id: str = ""
    fsync: str = ""
    segment: int = 0
    appended: int = 0
    durable: int = 0
    snapshot: int = 0
    generation: int = 0
    clean: bool = False
    place: Place = UNKNOWN_PLACE

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        counts = self.segment, self.appended, self.durable, self.snapshot, self.generation, self.clean, *self.place
        data = _FORM.pack(_MAGIC, self.boot_id.encode(), self.fsync.encode(), *counts)
        return data + _CRC.pack(zlib.crc32(data))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Watermark | None":
        """Read a file's content; ``None`` if it does not check."""
        form, crc = data[: _FORM.size], data[_FORM.size :]
        if len(form) != _FORM.size or crc != _CRC.pack(zlib.crc32(form)) or not form.startswith(_MAGIC):
            return None
        _, boot_id, fsync, segment, appended, durable, snapshot, generation, clean, *place = _FORM.unpack(form)
        boot_id, fsync = (each.rstrip(b"\0").decode() for each in (boot_id, fsync))
        return cls(boot_id, fsync, segment, appended, durable, snapshot, generation, clean, Place(*place))


def read_watermark(directory: Path, files: Files) -> Watermark | None:
    """Read a directory's lock, also while a server has the lock; ``None`` if the file is missing or damaged.

    Raises :class:`~psservice.storage.formats.OtherReleaseError`.
    """
    try:
        with files.open(directory / LOCK_NAME) as file:
            data = file.read()
    except OSError:
        return None
    require_mark(directory / LOCK_NAME, data, _MAGIC)
    return Watermark.from_bytes(data)


def is_copy(directory: Path, files: Files, watermark: Watermark) -> bool:
    """Tell whether a directory is a copy of the one in which the watermark was written."""
    return watermark.place.is_another(files.place(directory / LOCK_NAME))


class LockFile:
    """Creates and locks a directory until :meth:`close`; :class:`StorageError` if another process has the lock.

    Thread-safe. ``watermark`` is ``None`` if the file is new or damaged.
    """

    def __init__(self, directory: Path, files: Files) -> None:
        self._directory, self._files = directory, files
        self._writing = threading.Lock()
        try:
            files.make_directory(directory)
            self._file = files.open_lock(directory / LOCK_NAME)
        except OSError as error:
            raise StorageError(f"cannot write to {directory} (--data-dir): {error.strerror}") from error
        try:
            self._file.lock()
        except OSError as error:
            self.close()
            raise StorageError(
                f"{directory} is in use by another server; give each shard of each run a --data-dir of its own"
            ) from error
        try:
            self.watermark = read_watermark(directory, files)
        except StorageError:
            self.close()
            raise

    def begin(self, watermark: Watermark) -> None:
        """Write the first watermark of this process, and force it to the disk; raises ``OSError``."""
        with self._writing:
            self._write(replace(watermark, place=self._files.place(self._directory / LOCK_NAME)))
            self._file.sync()
            self._files.sync(self._directory)
            for parent in self._directory.parents[:2]:  # a directory is as durable as its name in the one above
                with suppress(PermissionError):
                    self._files.sync(parent)

    def note(self, **changes: Any) -> None:
        """Change attributes of the watermark; raises ``OSError``."""
        with self._writing:
            assert self.watermark is not None, "begin comes first"
            self._write(replace(self.watermark, **changes))

    def is_replaced(self) -> bool:
        """Tell whether the file's name stands for another file by now; raises ``OSError``."""
        return self._file.place().is_another(self._files.place(self._directory / LOCK_NAME))

    def close(self) -> None:
        """Force the watermark to the disk, and unlock the directory."""
        with suppress(OSError):
            self._file.sync()
        self._file.close()

    def _write(self, watermark: Watermark) -> None:
        self._file.overwrite(watermark.to_bytes())
        self.watermark = watermark

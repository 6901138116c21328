"""The file ``lock``: which process has a directory, and how far what the directory holds was acknowledged.

The journal alone cannot tell a record that its writer had not finished from one that somebody cut off, and a missing
file leaves no trace in those that stay. So the file says what must be there. One ``pwrite`` of fewer bytes than a
sector changes it, so the death of a process leaves the old content or the new one. It is not forced to the disk with
every change: after the death of the machine it may be older than the journal, and then asks for less.
"""

import fcntl
import os
import struct
import threading
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from psservice.storage.files import StorageError, sync_directory

LOCK_NAME = "lock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MAGIC = b"SPSLOCK1"
_FORM = struct.Struct("<8s36s8sQQQQQ")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Watermark:
    """How far a directory was acknowledged, and under which promise.

    Attributes:
        boot_id: of the machine's start in which ``appended`` holds; empty where that is not known.
        fsync: mode of the journal; empty where no journal is kept.
        segment: number of the journal's newest segment; 0 for none.
        appended: its bytes up to the end of the last record; they survive the death of the process.
        durable: its bytes that were forced to the disk; they survive the death of the machine.
        snapshot: segment in the name of the newest snapshot; 0 for none.
        generation: of the model in it.
    """

    boot_id: str = ""
    fsync: str = ""
    segment: int = 0
    appended: int = 0
    durable: int = 0
    snapshot: int = 0
    generation: int = 0

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        counts = self.segment, self.appended, self.durable, self.snapshot, self.generation
        data = _FORM.pack(_MAGIC, self.boot_id.encode(), self.fsync.encode(), *counts)
        return data + _CRC.pack(zlib.crc32(data))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Watermark | None":
        """Read a file's content; ``None`` where it does not check."""
        if len(data) != _FORM.size + _CRC.size or _CRC.pack(zlib.crc32(data[: _FORM.size])) != data[_FORM.size :]:
            return None
        magic, boot_id, fsync, *counts = _FORM.unpack(data[: _FORM.size])
        if magic != _MAGIC:
            return None
        return cls(boot_id.rstrip(b"\0").decode(), fsync.rstrip(b"\0").decode(), *counts)


def boot_id() -> str:
    """Return what changes when the machine is started anew; empty where that is not known."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def read_watermark(directory: Path) -> Watermark | None:
    """Return what a directory's lock says, also while a server has it; ``None`` where it is missing or damaged."""
    try:
        return Watermark.from_bytes((directory / LOCK_NAME).read_bytes())
    except OSError:
        return None


class LockFile:
    """A directory that this process has until :meth:`close`. Thread-safe.

    Args:
        directory: is created where it is not there.

    Attributes:
        watermark: what the file says; ``None`` where it is new or damaged.

    Raises:
        StorageError: another process has the directory, or it cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        """Take the directory."""
        self._directory = directory
        self._writing = threading.Lock()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # models are not for everybody
            self._descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageError(f"cannot write to {directory} (--data-dir): {error.strerror}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise StorageError(
                f"{directory} is in use by another server; give each shard of each run a --data-dir of its own"
            ) from error
        self.watermark = read_watermark(directory)

    def begin(self, watermark: Watermark) -> None:
        """Write the first watermark of this process, and force it to the disk; raises :class:`OSError`."""
        with self._writing:
            self._write(watermark)
            os.fsync(self._descriptor)
            sync_directory(self._directory)

    def note(self, **changes: Any) -> None:
        """Change attributes of the watermark; raises :class:`OSError`."""
        with self._writing:
            assert self.watermark is not None, "begin comes first"
            self._write(replace(self.watermark, **changes))

    def close(self) -> None:
        """Let the directory go."""
        os.close(self._descriptor)

    def _write(self, watermark: Watermark) -> None:
        os.pwrite(self._descriptor, watermark.to_bytes(), 0)
        self.watermark = watermark

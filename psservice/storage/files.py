"""Every file call below a data directory, so that a simulator can pass a disk of its own."""

import ctypes
import fcntl
import os
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from pscore.files import make_folder, sync
from psservice.model.copies import TensorCopy
from psservice.storage import tensor_file

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOST_PARTS = 512  # of one writev; Linux takes 1024
_STATX_BTIME = 0x800
_STATX = struct.Struct("<I76xqI")  # mask, and the seconds and nanoseconds of the birth
_STATX_BYTES = 256
_AT_FDCWD = -100


class StorageError(Exception):
    """The data directory cannot be used as it is; the message names the file and the next step."""


class Place(NamedTuple):
    """Which file a name stands for: a copy of the file has another place, the same file after a reboot has not.

    Attributes:
        inode: 0 if it is not known.
        born_nanoseconds: when the file was created, Unix time; 0 if the file system does not say.
    """

    inode: int = 0
    born_nanoseconds: int = 0

    def is_another(self, other: "Place") -> bool:
        """Tell whether these are two files, as far as both places are known."""
        return any(mine and theirs and mine != theirs for mine, theirs in zip(self, other, strict=True))


UNKNOWN_PLACE = Place()


class OpenFile:
    """A file open for writing; each method may raise ``OSError``."""

    def __init__(self, path: Path, flags: int) -> None:
        self._descriptor = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def lock(self) -> None:
        """Lock the file against other processes; raises ``OSError`` if one has the lock."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def append(self, parts: Sequence[bytes]) -> None:
        """Write every byte behind the end, or raise ``OSError`` with some of the bytes written."""
        views = [memoryview(part) for part in parts if part]
        while views:
            written = os.writev(self._descriptor, views[:_MOST_PARTS])
            while views and written >= len(views[0]):
                written -= len(views[0])
                views.pop(0)
            if views and written:
                views[0] = views[0][written:]

    def overwrite(self, data: bytes) -> None:
        """Write at the beginning, in one call."""
        os.pwrite(self._descriptor, data, 0)

    def cut(self, size: int) -> None:
        """Shorten the file."""
        os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        """Make the contents durable."""
        os.fdatasync(self._descriptor)

    def place(self) -> Place:
        """Return which file this is, whatever its name stands for by now."""
        return Place(os.fstat(self._descriptor).st_ino)

    def close(self) -> None:
        """Close the file, which unlocks it."""
        os.close(self._descriptor)


class Files:
    """The file system; each method may raise ``OSError``."""

    def open_new(self, path: Path) -> OpenFile:
        """Create a file to append to; the name must be free."""
        return OpenFile(path, os.O_WRONLY | os.O_EXCL | os.O_APPEND)

    def open_end(self, path: Path) -> OpenFile:
        """Open a file to append to its end."""
        return OpenFile(path, os.O_WRONLY | os.O_APPEND)

    def open_lock(self, path: Path) -> OpenFile:
        """Open a lock file, or create one."""
        return OpenFile(path, os.O_RDWR)

    def open(self, path: Path) -> BinaryIO:
        """Open a file to read."""
        return path.open("rb")

    def list(self, directory: Path) -> list[str]:
        """Return the names in a directory in order; none if there is no directory."""
        return sorted(os.listdir(directory)) if directory.is_dir() else []

    def make_directory(self, path: Path) -> None:
        """Create a directory that only its owner reads, with its parents, unless the directory exists."""
        make_folder(path, 0o700)

    def write(self, path: Path, data: bytes) -> None:
        """Write a whole file."""
        path.write_bytes(data)

    def save_tensors(self, path: Path, tensors: Mapping[str, TensorCopy]) -> None:
        """Write tensors as a safetensors file."""
        with path.open("wb") as file:
            tensor_file.write(file, tensors)
        path.chmod(0o644)

    def load_tensors(self, path: Path) -> dict[str, torch.Tensor]:
        """Read a safetensors file."""
        try:
            return load_file(path)
        except SafetensorError as error:
            raise OSError(str(error)) from error

    def rename(self, path: Path, to: Path) -> None:
        """Rename a file or a directory."""
        path.rename(to)

    def remove(self, path: Path) -> None:
        """Remove a file, if there is one."""
        path.unlink(missing_ok=True)

    def remove_empty(self, directory: Path) -> None:
        """Remove an empty directory."""
        directory.rmdir()

    def cut(self, path: Path, size: int) -> None:
        """Shorten a file."""
        os.truncate(path, size)

    def sync(self, path: Path) -> None:
        """Make a file's contents, or the names in a directory, durable."""
        sync(path)

    def place(self, path: Path) -> Place:
        """Return which file this is."""
        return Place(path.stat().st_ino, _birth_nanoseconds(path))

    def boot_id(self) -> str:
        """Return a value that changes when the machine is started anew; empty if that is not known."""
        try:
            return _BOOT_ID.read_text().strip()
        except OSError:
            return ""


DISK = Files()


def _birth_nanoseconds(path: Path) -> int:
    """Return when a file was created, which no program can set; 0 if file system or C library do not say."""
    found = ctypes.create_string_buffer(_STATX_BYTES)
    try:
        failed = ctypes.CDLL(None).statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_BTIME, found)
    except (AttributeError, OSError):
        return 0
    mask, seconds, nanoseconds = _STATX.unpack_from(found)
    return 0 if failed or not mask & _STATX_BTIME else seconds * 1_000_000_000 + nanoseconds


def discard(files: Files, path: Path) -> None:
    """Remove a directory of plain files, which loses its name first; a failure leaves the rest for another time.

    The name is gone from the disk before any file is, so no power cut leaves the name with a part of the files.
    """
    with suppress(OSError):
        if not path.name.startswith("."):
            hidden = path.with_name(f".{path.name}.tmp")
            files.rename(path, hidden)
            files.sync(path.parent)
            path = hidden
        for name in files.list(path):
            files.remove(path / name)
        files.remove_empty(path)

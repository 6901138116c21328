"""Files and directories that are there after a crash, and the errors where they are not."""

import fcntl
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOCK_NAME = "lock"


class StorageError(Exception):
    """The data directory cannot be used as it is; the message names the file and what to do."""


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make a file's contents durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(path: Path, fill: Callable[[Path], Any]) -> None:
    """Fill a directory under a temporary name, make it durable, and give it its name in one step.

    Args:
        path: the name, in an existing directory; must not exist yet.
        fill: writes files into the directory that it is handed.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    try:
        fill(temporary)
        for file in temporary.iterdir():
            sync_file(file)
        sync_directory(temporary)
        temporary.rename(path)
        sync_directory(path.parent)
    except BaseException:
        remove_directory(temporary if temporary.exists() else path)
        raise


def remove_directory(path: Path) -> None:
    """Remove a directory of plain files, which loses its name first; what cannot be removed stays, for another time."""
    try:
        if not path.name.startswith("."):
            path = path.rename(path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp"))
        for file in path.iterdir():
            file.unlink(missing_ok=True)
        path.rmdir()
    except OSError:
        pass


def lock(directory: Path) -> int:
    """Take a directory for this process, creating it; return the descriptor that holds the lock until it is closed.

    Raises:
        StorageError: another process has it, or it cannot be written.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # models are not for everybody
        descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StorageError(f"cannot write to {directory} (--data-dir): {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise StorageError(
            f"{directory} is in use by another server; give each shard of each run a --data-dir of its own"
        ) from error
    return descriptor

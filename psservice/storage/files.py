"""Files and directories that are there after a crash, and the errors where they are not."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any


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

"""Files and folders that must survive a power cut."""

import errno
import os
from contextlib import suppress
from pathlib import Path

_CANNOT_SYNC_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # some file systems in user space


def sync(path: Path) -> None:
    """Make a file's contents, or the names in a folder, durable; raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, as far as its file system can; raises ``OSError``."""
    try:
        sync(path)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC_FOLDERS:
            raise


def put_in_place(temporary: Path, path: Path) -> None:
    """Give a file that was written under a temporary name its own name, in the same folder; raises ``OSError``.

    The contents are durable before the file gets the name, and the name is durable when this returns. So a reader, also
    one behind a power cut, finds the earlier file or this one, whole.
    """
    sync(temporary)
    os.replace(temporary, path)
    sync_folder(path.parent)


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Make a folder, and those above it, unless they exist; their names are durable when this returns.

    ``mode`` holds for the folder itself. Raises ``OSError``.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    for each in missing:
        with suppress(PermissionError):  # a folder that may be written to and not read
            sync_folder(each.parent)

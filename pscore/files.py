"""Files and folders that must survive a power cut."""

import errno
import os
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

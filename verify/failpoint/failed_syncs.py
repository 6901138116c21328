"""``fsync`` and ``fdatasync`` of a server fail, with an error that a file names, as of a disk that breaks."""

import os
from collections.abc import Callable
from pathlib import Path


def set_error(path: Path, number: int) -> None:
    """Let each sync of whoever reads this file fail with an error's number; 0 for none."""
    path.write_text(str(number))


def install(path: Path) -> None:
    """Replace this process's calls by ones that look into the file first."""
    for name in ("fsync", "fdatasync"):
        real = getattr(os, name)

        def sync(descriptor: int, real: Callable[[int], None] = real) -> None:
            if number := int(path.read_text() or 0):
                raise OSError(number, os.strerror(number))
            real(descriptor)

        setattr(os, name, sync)

"""Copies of a data directory that stand for the directory itself, as a crash at that moment would have left it."""

import shutil
from dataclasses import replace
from pathlib import Path

from psservice.storage.files import DISK
from psservice.storage.lock_file import LOCK_NAME, Watermark


def image(directory: Path, to: Path) -> Path:
    """Copy a directory; no server takes the result for a copy, as its locks name their new places."""
    shutil.copytree(directory, to)
    for lock in to.rglob(LOCK_NAME):
        watermark = Watermark.from_bytes(lock.read_bytes())
        if watermark is not None:
            lock.write_bytes(replace(watermark, place=DISK.place(lock)).to_bytes())
    return to

"""Waiting until something is so, for at most a time."""

import os
import time
from collections.abc import Callable
from pathlib import Path

_LOOK_SECONDS = 0.1
_SHORT_SECONDS = 0.0005


def until(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait until it holds, looked at ten times a second; tell whether it does."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def await_unfinished(folder: Path, seconds: float) -> Path | None:
    """Wait until something new is being written in a folder, under a name that ends in ``.tmp``.

    Return it, or ``None`` if nothing is for so long.
    """
    old, end = _unfinished(folder), time.monotonic() + seconds
    while time.monotonic() < end:
        if new := _unfinished(folder) - old:
            return folder / new.pop()
        time.sleep(_SHORT_SECONDS)
    return None


def _unfinished(folder: Path) -> set[str]:
    return {entry.name for entry in os.scandir(folder) if entry.name.endswith(".tmp")}

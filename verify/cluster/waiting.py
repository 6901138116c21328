"""Waiting until something is so, for at most a time."""

import time
from collections.abc import Callable

_LOOK_SECONDS = 0.1


def until(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait until it holds, looked at ten times a second; tell whether it does."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_SECONDS)
    return True

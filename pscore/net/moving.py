"""A stream of answers that is broken off if it stands still."""

import threading
import time
from collections.abc import Iterator
from typing import Any


def moving(call: Any, idle_seconds: float) -> Iterator[bytes]:
    """Yield the messages of a call, and cancel the call if none comes for ``idle_seconds`` while one is awaited."""
    ended, moved = threading.Event(), [time.monotonic()]

    def watch() -> None:
        while not ended.wait(min(1.0, idle_seconds / 4)):
            if time.monotonic() > moved[0] + idle_seconds:
                call.cancel()
                return

    watcher = threading.Thread(target=watch, name="moving", daemon=True)
    watcher.start()
    try:
        for message in call:
            moved[0] = time.monotonic()
            yield message
            moved[0] = time.monotonic()  # the time of reading it is not the line's
    finally:
        ended.set()
        watcher.join()

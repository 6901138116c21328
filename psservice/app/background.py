"""What a server does beside serving: compile its loops before the first push, and give freed memory back."""

import ctypes
import logging
import threading
from collections.abc import Callable

from pscore.warmup import warm_up

log = logging.getLogger("psservice")

TRIM_SECONDS = 3.0
_POLL_SECONDS = 0.1
_WORTH_COMPILING = 65_536


class Upkeep:
    """A thread of small chores.

    Args:
        size: returns the number of elements of the model, 0 before it is known: small ones need no compiled loop.
    """

    def __init__(self, size: Callable[[], int]) -> None:
        """Start it."""
        self._size = size
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="upkeep", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._stop.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._size():
            if self._stop.wait(_POLL_SECONDS):
                return
        if self._size() >= _WORTH_COMPILING:
            try:
                warm_up()
            except Exception:  # the first push will meet the same, and answer it
                log.exception("the loops could not be compiled ahead")
        trim = _malloc_trim()
        while trim is not None and not self._stop.wait(TRIM_SECONDS):
            trim()


def _malloc_trim() -> Callable[[], object] | None:
    """Return a call that gives free memory back to the system; ``None`` where the C library has none (musl).

    Every thread that answers calls has an arena of its own, in which glibc keeps what was freed: without this, a
    server's resident set would grow with the number of workers, though it holds nothing for them.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None
    return lambda: trim(0)

"""The way in for what changes a shard: open, or closed while the server is drained; and who is inside."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pscore.wire.errors import ErrorCode, Rejected


class DrainGate:
    """Counts the calls that may change the shard, and lets no new one act while it is closed. Thread-safe.

    A call is counted before it asks whether the door is open. So once the door is closed, nothing comes in behind the
    count: when it reaches zero, no worker changes the shard any more.
    """

    def __init__(self) -> None:
        """Begin open."""
        self._lock = threading.Lock()
        self._inside = 0
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether new calls are refused."""
        return self._closed

    @property
    def inside(self) -> int:
        """Calls that have come in and not ended."""
        return self._inside

    def close(self) -> None:
        """Refuse new calls from now on; those inside go on."""
        with self._lock:
            self._closed = True

    def open(self) -> None:
        """Let calls in again."""
        with self._lock:
            self._closed = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Count a call for as long as the context lasts."""
        with self._lock:
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1

    def require_open(self) -> None:
        """Refuse what is new while the door is closed; raises :class:`Rejected` (``DRAINING``)."""
        with self._lock:
            if self._closed:
                raise Rejected(ErrorCode.DRAINING, "the server is drained, or stopping")

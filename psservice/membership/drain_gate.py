"""The gate in front of everything that changes a shard: closed while the server is drained."""

import threading

from pscore.wire.errors import ErrorCode, Rejected


class DrainGate:
    """Counts the calls inside its context, and refuses new changes while ``is_closed``, set from any thread.

    A caller enters before it asks whether the gate is open. So once the gate is closed and the count is zero, no
    worker changes the shard any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.in_flight = 0
        self.is_closed = False

    def __enter__(self) -> None:
        with self._lock:
            self.in_flight += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.in_flight -= 1

    def require_open(self) -> None:
        """Raise :class:`Rejected` (``DRAINING``) while the gate is closed."""
        if self.is_closed:
            raise Rejected(ErrorCode.DRAINING, "the server is drained, or stopping")

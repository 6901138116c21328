"""The clock of leases, which stands still while the process does."""

import threading
import time
from collections.abc import Callable


class ServingClock:
    """Seconds during which this process could have answered. Thread-safe.

    A process that is stopped or swapped out receives no renewal meanwhile. When it continues, renewals that wait must
    be served before any lease ends. So time between two readings counts up to ``longest_gap`` seconds only, and the
    clock must be read more often than that. ``clock`` returns monotonic seconds.
    """

    def __init__(self, longest_gap: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_gap, self._clock = longest_gap, clock
        self._lock = threading.Lock()
        self._read = clock()
        self._time = 0.0

    def __call__(self) -> float:
        """Return the seconds that have counted."""
        with self._lock:
            now = self._clock()
            self._time += min(now - self._read, self._longest_gap)
            self._read = now
            return self._time

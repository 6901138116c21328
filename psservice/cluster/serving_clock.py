"""The clock of leases: it stands still while the process does."""

import threading
import time
from collections.abc import Callable


class ServingClock:
    """Seconds during which this process could have answered. Thread-safe.

    A process that is stopped, swapped out or held by its machine hears of no renewal meanwhile. When it goes on, those
    that wait must come before any lease ends; so time between two readings counts up to a bound only. Somebody has to
    read the clock more often than that.

    Args:
        longest_gap: seconds between two readings that count.
        clock: monotonic seconds.
    """

    def __init__(self, longest_gap: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin at zero."""
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

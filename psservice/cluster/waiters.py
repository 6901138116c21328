"""Calls that wait for other workers, and what wakes them."""

import threading
from collections.abc import Callable


class Waiters:
    """The calls that wait; thread-safe. Each looks for itself whether its wait is over."""

    def __init__(self) -> None:
        self._wakes: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def add(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called at each change, in any thread; it must not wait."""
        with self._lock:
            self._wakes.append(wake)

    def remove(self, wake: Callable[[], None]) -> None:
        """Call it no more."""
        with self._lock:
            self._wakes.remove(wake)

    def wake(self) -> None:
        """Wake all of them."""
        with self._lock:
            wakes = list(self._wakes)
        for wake in wakes:
            wake()

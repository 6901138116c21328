"""Beginning a step while the machine is quiet, where others use it too: decided before, so it favours no plan."""

import time

import numpy as np

_SLOWER = 1.25
_PIECES = 6
_PATIENCE_SECONDS = 1.0


class QuietGate:
    """Lets through when a fixed piece of work takes next to its shortest time so far, several times in a row."""

    def __init__(self) -> None:
        self._source = np.ones(1 << 20, dtype=np.float32)
        self._shortest = min(self._piece() for _ in range(50))
        self._waits = self._given_up = 0

    @property
    def noisy(self) -> float:
        """Share of the waits that were given up."""
        return self._given_up / max(1, self._waits)

    def wait(self) -> None:
        """Wait until the machine is quiet, or patience is over."""
        self._waits += 1
        end, quiet = time.perf_counter() + _PATIENCE_SECONDS, 0
        while quiet < _PIECES:
            seconds = self._piece()
            self._shortest = min(self._shortest, seconds)
            quiet = quiet + 1 if seconds <= _SLOWER * self._shortest else 0
            if time.perf_counter() > end:
                self._given_up += 1
                return

    def _piece(self) -> float:
        started = time.perf_counter()
        for _ in range(4):
            self._source.sum()
        return time.perf_counter() - started

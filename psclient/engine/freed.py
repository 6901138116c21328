"""Memory that large steps have freed, given back to the system."""

import time

from pscore.malloc import trimming

_LARGE_BYTES = 16 << 20  # of a step's messages; below, there is little to give back
_LEAST_SECONDS = 3.0  # between two times: the system clears the pages that are used again


class FreedMemory:
    """Gives back the memory of pushes and replies: glibc keeps pieces of it, in an arena of every thread."""

    def __init__(self) -> None:
        self._trim = trimming()
        self._last = -_LEAST_SECONDS

    def give_back(self, nbytes: int) -> None:
        """Note that a step with messages of so many bytes has ended."""
        now = time.monotonic()
        if self._trim is not None and nbytes >= _LARGE_BYTES and now - self._last >= _LEAST_SECONDS:
            self._trim()
            self._last = time.monotonic()

"""The rate of a line, from the transfers on it."""

from collections import deque

_SMALLEST_BYTES = 64 << 10  # below it, a time depends more on delay than on bandwidth
_REMEMBERED = 16  # transfers


class Bandwidth:
    """The fastest of the last large transfers: a lower bound, because other things may have slowed each of them."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def bytes_per_second(self) -> float | None:
        """The estimate; ``None`` before the first large transfer."""
        return max(self._recent, default=None)

    def update(self, nbytes: int, seconds: float) -> None:
        """Count a transfer: from its first byte to its last, without the time for decoding."""
        if nbytes >= _SMALLEST_BYTES and seconds > 0:
            self._recent.append(nbytes / seconds)

"""The rate of a line, from the transfers on it."""

from collections import deque

_SMALLEST_BYTES = 64 << 10  # below it, a time depends more on delay than on bandwidth
_REMEMBERED = 4  # transfers


class Bandwidth:
    """The fastest of the last large transfers: a lower bound, because other things may have slowed each of them.

    Attributes:
        transfers: the large ones so far.
    """

    def __init__(self) -> None:
        self.transfers = 0
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def bytes_per_second(self) -> float | None:
        """The estimate; ``None`` before the first large transfer."""
        return max(self._recent, default=None)

    def update(self, nbytes: int, seconds: float) -> None:
        """Count a transfer: its bytes behind the first message, and their time without that for decoding."""
        if nbytes >= _SMALLEST_BYTES and seconds > 0:
            self.transfers += 1
            self._recent.append(nbytes / seconds)

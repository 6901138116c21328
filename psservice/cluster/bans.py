"""Workers that an operator keeps out for a time."""

from collections.abc import Callable

from pscore.wire.errors import ErrorCode, Rejected


class Bans:
    """Names that are kept out, and until when. Not thread-safe; in memory only, so a restart forgets them.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Keep nobody out."""
        self._clock = clock
        self._ends: dict[str, float] = {}

    def put(self, worker_id: str, seconds: float) -> None:
        """Keep a name out for so long from now on; 0 lets it in."""
        self._forget()
        self._ends.pop(worker_id, None)
        if seconds > 0:
            self._ends[worker_id] = self._clock() + seconds

    def require_none(self, worker_id: str) -> None:
        """Refuse a worker that is kept out; raises :class:`Rejected` (``EVICTED``)."""
        remaining = self._ends.get(worker_id, 0.0) - self._clock() if self._ends else 0.0
        if remaining > 0:
            raise Rejected(
                ErrorCode.EVICTED,
                f"an operator has evicted worker {worker_id!r}; it may come back in {remaining:.1f} s",
                retry_seconds=remaining,
                worker=worker_id,
            )

    def remaining(self) -> dict[str, float]:
        """Return the names that are kept out, and for how many seconds more."""
        self._forget()
        now = self._clock()
        return {name: self._ends[name] - now for name in sorted(self._ends)}

    def _forget(self) -> None:
        now = self._clock()
        self._ends = {name: end for name, end in self._ends.items() if end > now}

"""Names of workers that an operator keeps out for a time."""

from collections.abc import Callable

from pscore.wire.errors import ErrorCode, Rejected


class Bans:
    """When the ban of each name ends, by a monotonic clock. Not thread-safe; a restart forgets all bans."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: dict[str, float] = {}

    def put(self, worker_id: str, seconds: float) -> None:
        """Ban a name for so long from now on; 0 ends the ban."""
        self._ends.pop(worker_id, None)
        if seconds > 0:
            self._ends[worker_id] = self._clock() + seconds

    def require_none(self, worker_id: str) -> None:
        """Refuse a banned worker; raises :class:`Rejected` (``EVICTED``)."""
        remaining = self._ends.get(worker_id, 0.0) - self._clock() if self._ends else 0.0
        if remaining > 0:
            raise Rejected(
                ErrorCode.EVICTED,
                f"an operator has evicted worker {worker_id!r}; it may come back in {remaining:.1f} s",
                retry_seconds=remaining,
                worker=worker_id,
            )

    def remaining(self) -> dict[str, float]:
        """Return the seconds that are left of each ban, by name."""
        now = self._clock()
        self._ends = {name: end for name, end in sorted(self._ends.items()) if end > now}
        return {name: end - now for name, end in self._ends.items()}

"""Which pushes are admitted, by staleness and lead; each rule is off at 0 (docs/reference/protocol.md)."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from pscore.wire.errors import ErrorCode, Rejected
from psservice.awaiting import NotYetError
from psservice.values import Identity


@dataclass(frozen=True, slots=True)
class Pace:
    """A worker's clock beside the lowest of the other live ones."""

    clock: int
    slowest: int
    slowest_worker: Identity


@dataclass(frozen=True, slots=True)
class Admission:
    """The admission rules of a run: pushes of others since the base, and the lead in pushes."""

    max_staleness: int = 0
    ssp_bound: int = 0

    def require_fresh(self, staleness: int, *, in_rounds: bool = False) -> None:
        """Apply the cut-off, in synchronous training that of a closed round; raises ``Rejected`` (``TOO_STALE``)."""
        limit = 0 if in_rounds else self.max_staleness
        if staleness <= limit or not (in_rounds or limit):
            return
        if in_rounds:
            why = f"{staleness} rounds were closed since the worker's pull; what it computed is too late for them"
        else:
            why = f"{staleness} pushes of others were applied since the worker's pull, at most {limit} may be"
        raise Rejected(ErrorCode.TOO_STALE, why, staleness=str(staleness), max_staleness=str(limit))

    def require_in_step(self, read_pace: Callable[[], Pace | None]) -> None:
        """Apply the bound; a pace of ``None`` is a worker that is alone. Raises ``NotYetError`` (``TOO_FAR_AHEAD``)."""
        if not self.ssp_bound or (pace := read_pace()) is None:
            return
        lead = _lead(pace)
        if lead > self.ssp_bound:
            slowest = pace.slowest_worker.worker_id
            raise NotYetError(
                ErrorCode.TOO_FAR_AHEAD,
                f"this push would be {lead} ahead of worker {slowest!r}, at most {self.ssp_bound} may be",
                lambda: (now := read_pace()) is None or _lead(now) <= self.ssp_bound,
                pusher=lambda: None if (now := read_pace()) is None else now.slowest_worker,
                worker=slowest,
                ssp_bound=str(self.ssp_bound),
            )


def _lead(pace: Pace) -> int:
    """Count how many pushes a worker would be ahead of the slowest after its next one."""
    return pace.clock + 1 - pace.slowest


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

"""Which workers a round waits for, from how long each of them took before."""

import math
import statistics
from collections.abc import Callable, Collection

_TIMES = 2


class ExpectedWorkers:
    """The workers whose next contribution is due before a round has lasted ``factor`` times as long as a usual one.

    A worker takes from the close of the round in which it contributed to its next contribution; of the last two such
    times the shorter counts, so that a pause is forgotten, and a first step, which compiles. A usual round is the
    median of the live workers' times, once those of half of them are known. Until then every worker is expected.

    A worker that takes as long as several rounds is expected in the round in which it is due. One that has not come by
    then is expected again after its next contribution. If all have paused, the first to come ends no round alone.

    These are times of this process: a restart begins anew. :meth:`contributes` and :meth:`closed` are for the apply
    thread, all else is for any thread. ``clock`` returns seconds.
    """

    def __init__(self, factor: float, clock: Callable[[], float]) -> None:
        self._factor, self._clock = factor, clock
        self._opened: float | None = None
        self._first: float | None = None  # contribution to the open round
        self._since: dict[str, float] = {}
        self._times: dict[str, tuple[float, ...]] = {}

    def contributes(self, worker: str) -> None:
        """Note that a contribution of a worker has come."""
        now = self._clock()
        if self._first is None:
            self._first = now
        since = self._since.pop(worker, None)
        if since is not None:
            self._times[worker] = (*self._times.get(worker, ()), now - since)[-_TIMES:]

    def closed(self, contributors: Collection[str], live: Collection[str]) -> None:
        """Note that a round has closed; its contributors, and who has joined meanwhile, begin something new."""
        now = self._clock()
        self._opened, self._first = now, None
        self._since = {name: now if name in contributors else self._since.get(name, now) for name in live}
        self._times = {name: times for name, times in self._times.items() if name in self._since}

    def of(self, live: Collection[str]) -> set[str]:
        """Return those of the live workers that the open round waits for; none once it has lasted too long."""
        end = self._end(live)
        if self._clock() >= end:
            return set()
        return {worker for worker in live if self._is_expected(worker, end)}

    def seconds_left(self, live: Collection[str]) -> float:
        """Return the time until the open round waits for nobody any more; infinite if it waits for all."""
        return max(0.0, self._end(live) - self._clock())

    def _end(self, live: Collection[str]) -> float:
        opened, first = self._opened, self._first
        known = [seconds for worker in live if (seconds := self._seconds_of(worker)) is not None]
        if opened is None or not known or 2 * len(known) < len(live):
            return math.inf
        usual = statistics.median(known)
        at_least = opened if first is None else first - usual
        return max(opened, at_least) + self._factor * usual

    def _is_expected(self, worker: str, end: float) -> bool:
        opened, since = self._opened, self._since.get(worker)
        if opened is None or since is None:
            return True
        return opened <= since + (self._seconds_of(worker) or 0.0) <= end

    def _seconds_of(self, worker: str) -> float | None:
        """Return how long a worker takes; ``None`` before its third contribution."""
        times = self._times.get(worker, ())
        return min(times) if len(times) == _TIMES else None

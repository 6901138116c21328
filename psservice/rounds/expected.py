"""Which workers a round waits for, from how long each of them took before."""

import math
import statistics
from collections.abc import Callable, Collection


class ExpectedWorkers:
    """The workers that take at most ``factor`` times as long as usual, and that have begun with the open round.

    A worker takes from the close of the round in which it contributed to its next contribution; of the last two such
    times the shorter counts, so that a pause is forgotten. Usual is the median of the live workers' times, once those
    of half of them are known. Until then a round waits for every worker, and after that for nobody longer than
    ``factor`` times as long as usual. If all have paused, the first to come ends no round alone.

    A worker that a round has closed without has begun before the next one, which does not wait for it either. What it
    brings is taken when it comes.

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
            self._times[worker] = (*self._times.get(worker, ())[-1:], now - since)

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
        opened, first, times = self._opened, self._first, self._times
        known = [min(times[worker]) for worker in live if worker in times]
        if opened is None or not known or 2 * len(known) < len(live):
            return math.inf
        usual = statistics.median(known)
        return max(opened, opened if first is None else first - usual) + self._factor * usual

    def _is_expected(self, worker: str, end: float) -> bool:
        opened, since = self._opened, self._since.get(worker)
        if opened is None or since is None:
            return True
        return since >= opened and since + min(self._times.get(worker, (0.0,))) <= end

"""Which workers a round waits for, from how long each of them took before."""

import statistics
from collections.abc import Callable, Collection


class ExpectedWorkers:
    """The workers that take at most ``factor`` times as long as usual, and that have begun with the open round.

    A worker takes from the close of the round in which it contributed to its next contribution; of the last two such
    times the shorter counts, so that a pause is forgotten. Usual is, at the close of a round, the median of the live
    workers' times, if those of half of them are known. Then the next round waits for nobody longer than ``factor``
    times as long as that; if all have paused, the first to come ends no round alone. Else it lasts at most ``longest``
    seconds behind its first contribution.

    So every round ends. Otherwise two workers might wait for each other, each at a shard at which the other is late.

    A worker that a round has closed without has begun before the next one, which does not wait for it either, nor for
    one that has joined and has not contributed yet. What they bring is taken when it comes.

    These are times of this process: after a restart the first round waits for all. :meth:`contributed` and
    :meth:`closed` are for the apply thread, all else is for any thread. ``clock`` returns seconds.
    """

    def __init__(self, factor: float, longest: float, clock: Callable[[], float]) -> None:
        self._factor, self._longest, self._clock = factor, longest, clock
        self._opened, self._is_first = clock(), True
        self._first_came: float | None = None
        self._usual: float | None = None
        self._since: dict[str, float] = {}
        self._times: dict[str, tuple[float, ...]] = {}

    def contributed(self, worker: str) -> None:
        """Note that a worker is in the open round now."""
        now = self._clock()
        if self._first_came is None:
            self._first_came = now
        since = self._since.pop(worker, None)
        if since is not None:
            self._times[worker] = (*self._times.get(worker, ())[-1:], now - since)

    def closed(self, contributors: Collection[str], live: Collection[str]) -> None:
        """Note that a round has closed, and that its contributors begin something new."""
        now = self._clock()
        since = self._since | dict.fromkeys(contributors, now)
        self._since = {name: since[name] for name in live if name in since}
        self._times = {name: self._times[name] for name in live if name in self._times}
        self._usual = None
        if 2 * len(self._times) >= len(live) > 0:
            self._usual = statistics.median(map(min, self._times.values()))
        self._opened, self._first_came, self._is_first = now, None, False

    def of(self, live: Collection[str]) -> list[str]:
        """Return those of the live workers that the open round waits for; none once it has lasted too long."""
        end = self._end()
        return [] if self._clock() >= end else [name for name in live if self._is_expected(name, end)]

    @property
    def seconds_left(self) -> float:
        """The time until the open round waits for nobody any more."""
        return max(0.0, self._end() - self._clock())

    def _end(self) -> float:
        opened, came = self._opened, self._first_came
        if self._usual is None:
            return (opened if came is None else came) + self._longest
        return max(opened, opened if came is None else came - self._usual) + self._factor * self._usual

    def _is_expected(self, worker: str, end: float) -> bool:
        since = self._since.get(worker)
        if since is None:
            return self._is_first
        return since >= self._opened and since + min(self._times.get(worker, (0.0,))) <= end

"""Discrete events in virtual time: processes that wait, links that several transfers share."""

import heapq
import itertools
from collections.abc import Callable, Generator
from functools import partial


class Event:
    """Something that happens once; whoever waits goes on then."""

    __slots__ = ("_waiting", "happened")

    def __init__(self) -> None:
        self.happened = False
        self._waiting: list[Callable[[], None]] = []

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits."""
        return bool(self._waiting)

    def fire(self) -> None:
        self.happened = True
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            resume()

    def then(self, resume: Callable[[], None]) -> None:
        """Call back when it happens, or at once if it has."""
        if self.happened:
            resume()
        else:
            self._waiting.append(resume)


Process = Generator[Event, None, None]
"""A process yields what it waits for."""


class Simulator:
    def __init__(self) -> None:
        self.now = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def call(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something after a while; what is due at one moment is done in the order of asking."""
        heapq.heappush(self._agenda, (self.now + seconds, next(self._numbers), action))

    def wait(self, seconds: float) -> Event:
        """Return what happens after a while."""
        event = Event()
        self.call(seconds, event.fire)
        return event

    def start(self, process: Process) -> Event:
        end = Event()

        def advance() -> None:
            for event in process:
                if not event.happened:
                    event.then(advance)
                    return
            end.fire()

        self.call(0, advance)
        return end

    def run(self, until: Callable[[], bool]) -> None:
        """Let time pass until a condition holds, or nothing is left to happen."""
        while self._agenda and not until():
            self.now, _, action = heapq.heappop(self._agenda)
            action()


class Link:
    """One direction of a network card: transfers under way share its rate equally (processor sharing).

    Args:
        simulator: the clock.
        bytes_per_second: of the link; infinite for none.
        most: that one transfer gets: the rate of the card at its other end.
    """

    def __init__(self, simulator: Simulator, bytes_per_second: float, most: float = float("inf")) -> None:
        self._ended = 0.0  # bytes of transfers that are through
        self._simulator, self._rate, self._most = simulator, bytes_per_second, most
        self._served = 0.0  # bytes that a transfer would have got that was there from the beginning
        self._since = 0.0
        self._flows: list[tuple[float, int, float, Event]] = []  # (served when done, order, size, its end)
        self._numbers = itertools.count()
        self._round = 0

    @property
    def carried(self) -> float:
        """Bytes until now, those of transfers under way among them."""
        self._advance()
        return self._ended + sum(size - max(0.0, end - self._served) for end, _, size, _ in self._flows)

    @property
    def under_way(self) -> int:
        """Transfers that share the link now."""
        return len(self._flows)

    def transfer(self, size: float) -> Event:
        """Carry bytes; return the moment at which the last one is through."""
        event = Event()
        if min(self._rate, self._most) == float("inf") or size <= 0:
            self._ended += size
            event.fire()
            return event
        self._advance()
        heapq.heappush(self._flows, (self._served + size, next(self._numbers), size, event))
        self._expect()
        return event

    def _share(self) -> float:
        return min(self._rate / len(self._flows), self._most)

    def _advance(self) -> None:
        if self._flows:
            self._served += (self._simulator.now - self._since) * self._share()
        self._since = self._simulator.now

    def _expect(self) -> None:
        """Set the moment of the next end anew; those set before no longer count."""
        self._round += 1
        if self._flows:
            seconds = max(0.0, self._flows[0][0] - self._served) / self._share()
            self._simulator.call(seconds, partial(self._finish, self._round))

    def _finish(self, of_round: int) -> None:
        if of_round != self._round:
            return
        self._advance()
        self._served = max(self._served, self._flows[0][0])
        done = []
        while self._flows and self._flows[0][0] <= self._served * (1 + 1e-12):
            _, _, size, event = heapq.heappop(self._flows)
            self._ended += size
            done.append(event)
        self._expect()
        for event in done:
            event.fire()

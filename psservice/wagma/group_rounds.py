"""When the rounds of WAGMA-SGD freeze, which workers wait, and which are averaged (docs/guide/wagma.md)."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from psservice.model.training_mode import GroupSettings
from psservice.wagma.schedule import StepTimes, groups_of

_SHORTEST_WINDOW_SECONDS = 0.001
_DROPPED = 1 << 62
"""Iteration of a worker whose push was dropped by a rollback and who has pushed none since: beyond all others."""


@dataclass(slots=True)
class OpenRound:
    """One group at one iteration, not frozen yet: ``fresh`` members have pushed, the first at ``since``, and wait."""

    iteration: int
    members: set[str]
    fresh: set[str] = field(default_factory=set)
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Frozen:
    """A round's members at the freeze: ``fresh`` ones have arrived, an older model of ``stale`` ones is averaged."""

    iteration: int
    fresh: tuple[str, ...]
    stale: tuple[str, ...]
    absent: tuple[str, ...]


class GroupRounds:
    """The rounds of one shard; called on the apply thread. ``clock`` returns seconds.

    Times matter to :meth:`due` alone, so a replay of the same decisions ends in the same state.

    Attributes:
        reached: by worker, the iteration of its last push; :data:`_DROPPED` keeps a worker out of new rounds.
        newest: the last iteration of which a round was opened; −1 before the first.
    """

    def __init__(self, settings: GroupSettings, clock: Callable[[], float]) -> None:
        self._settings, self._clock = settings, clock
        self._times = StepTimes()
        self._began: dict[str, float] = {}
        self._open: list[OpenRound] = []  # by iteration
        self.reached: dict[str, int] = {}
        self.newest = -1

    def enter(self, worker: str) -> None:
        """Add a worker; the worker is a member of rounds that are opened from now on."""
        self.reached[worker] = self.newest
        self._began[worker] = self._clock()

    def leave(self, worker: str) -> None:
        """Remove a worker; no round waits for that worker any more."""
        del self.reached[worker]
        self._began.pop(worker, None)
        self._times.forget(worker)
        self._remove_member(worker, self._open)

    def arrive(self, worker: str, iteration: int) -> bool:
        """Note a push; tell whether the worker waits now. If not, the round is frozen or has no such member."""
        now = self._clock()
        self._times.saw(worker, now - self._began.get(worker, now))
        self._began[worker] = now
        self.reached[worker] = iteration
        self._remove_member(worker, [each for each in self._open if each.iteration < iteration])
        if iteration > self.newest:  # its rounds are over the workers that have not passed it
            behind = sorted(other for other, reached in self.reached.items() if other == worker or reached < iteration)
            self._open += [OpenRound(iteration, {*group}) for group in groups_of(self._settings, behind, iteration)]
            self.newest = iteration
        for each in self._open:
            if each.iteration == iteration and worker in each.members:
                each.since = each.since if each.fresh else now
                each.fresh.add(worker)
                return True
        return False

    def waits(self, worker: str) -> OpenRound | None:
        """Return the round that a worker waits for."""
        return next((each for each in self._open if worker in each.fresh), None)

    def seconds_left(self, waiting: OpenRound) -> float:
        """Return the rest of a round's window; infinite for a global round, which waits for all."""
        if self._settings.is_global(waiting.iteration):
            return math.inf
        return max(
            _SHORTEST_WINDOW_SECONDS, self._times.grace_seconds(waiting.members) - (self._clock() - waiting.since)
        )

    def due(self, fits: Callable[[Frozen], bool] = lambda frozen: True) -> Frozen | None:
        """Return a round that is to freeze now, and that ``fits``; ``None`` if there is none."""
        frozen = [self._frozen(each) for each in self._open if self.is_due(each)]
        return next(filter(fits, frozen), None)

    def freeze(self, iteration: int, worker: str) -> Frozen:
        """Close the open round of an iteration in which a worker has arrived; raises ``ValueError``."""
        found = self.waits(worker)
        if found is None or found.iteration != iteration:
            raise ValueError(f"no round of iteration {iteration} is open in which {worker!r} has come")
        self._open.remove(found)
        self._began |= dict.fromkeys(found.fresh, self._clock())
        return self._frozen(found)

    def waiting(self) -> set[str]:
        """Return the workers that wait for their round, or were dropped with one and have not arrived again."""
        dropped = {worker for worker, iteration in self.reached.items() if iteration == _DROPPED}
        return dropped.union(*(each.fresh for each in self._open))

    def begin_anew(self, dropped: Collection[str] = ()) -> None:
        """Drop all open rounds, and open none over these workers until they have arrived again."""
        self._open.clear()
        self.reached |= {worker: _DROPPED for worker in dropped if worker in self.reached}

    def export(self) -> dict[str, Any]:
        """Return everything but times, as JSON can hold it."""
        rounds = [(each.iteration, sorted(each.members), sorted(each.fresh)) for each in self._open]
        return {"reached": self.reached, "newest": self.newest, "rounds": rounds}

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Restore what :meth:`export` returned; windows of grace begin anew."""
        self.reached, self.newest = dict(plain["reached"]), plain["newest"]
        now = self._clock()
        self._began = dict.fromkeys(self.reached, now)
        self._open += [OpenRound(t, {*members}, {*fresh}, now) for t, members, fresh in plain["rounds"]]

    def _frozen(self, freezing: OpenRound) -> Frozen:
        t, tau = freezing.iteration, self._settings.tau
        others = sorted(freezing.members - freezing.fresh)
        stale = tuple(worker for worker in others if t - self.reached[worker] <= tau)
        absent = tuple(worker for worker in others if worker not in stale)
        return Frozen(t, tuple(sorted(freezing.fresh)), stale, absent)

    def is_due(self, each: OpenRound) -> bool:
        """Tell whether a round is to freeze now."""
        if not each.fresh:
            return False
        if each.members == each.fresh:
            return True
        if self._settings.is_global(each.iteration):
            return False
        if all(self.reached[worker] < each.iteration - 1 for worker in each.members - each.fresh):
            return True
        return self._clock() - each.since >= self._times.grace_seconds(each.members)

    def _remove_member(self, worker: str, rounds: Collection[OpenRound]) -> None:
        """Remove a worker from rounds in which it will not arrive any more."""
        for each in rounds:
            each.members.discard(worker)
            each.fresh.discard(worker)
        self._open = [each for each in self._open if each.members]

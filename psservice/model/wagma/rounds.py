"""When the rounds of WAGMA-SGD freeze: who has come, who is waited for, and over whom is averaged. No tensors here.

A round is one group at one iteration. The first member to push opens it, and starts a window of grace; it freezes when
every member has come that has pushed the iteration before, or the window has ended: who is further behind cannot come
in time. A global round has no window: it waits for all that are alive.
"""

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from psservice.model.wagma.schedule import GroupSettings, StepTimes

_SHORTEST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.002, 0.5
_POLL_SHARE = 0.1
_BEYOND_ALL = 1 << 62


@dataclass(slots=True)
class Round:
    """One group at one iteration, not frozen yet.

    Attributes:
        iteration: ``t``.
        members: who belongs to it and is alive.
        fresh: who has pushed iteration ``t``, and waits.
        since: when the first of these came.
        is_global: whether it waits for every member.
    """

    iteration: int
    members: set[str]
    is_global: bool
    fresh: set[str] = field(default_factory=set)
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Frozen:
    """Over whom a round is averaged, and for whom a place is kept.

    Attributes:
        iteration: ``t``.
        fresh: who has come; each gets the average.
        stale: whose older model stands in, being at most ``τ`` iterations old; replaced or joined when they come.
        absent: whose model is older than that and is left out; joined when they come.
    """

    iteration: int
    fresh: tuple[str, ...]
    stale: tuple[str, ...]
    absent: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """What happened in the groups but for pushes; the journal has it, and a replay repeats it.

    Attributes:
        kind: a worker was taken in or let go, or a round froze.
        worker: which; of a round, one that had come to it.
        incarnation: of a worker that was taken in.
        iteration: of a round.
    """

    kind: Literal["enter", "leave", "freeze"]
    worker: str
    incarnation: str = ""
    iteration: int = 0

    def to_bytes(self) -> bytes:
        """Write it for the journal."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Decision":
        """Read what :meth:`to_bytes` has written; raises ``ValueError``."""
        try:
            return cls(**json.loads(data))
        except TypeError as error:
            raise ValueError(f"no decision: {error}") from error


class WagmaRounds:
    """The rounds of one shard. Called on the writer thread.

    What happens follows from the calls and their order; only :meth:`due` looks at the clock. So a replay that is
    told which rounds froze ends in the same state.

    Args:
        settings: the run's.
        clock: monotonic seconds.

    Attributes:
        reached: by worker, the iteration of its last push; beyond all for one whose push was dropped when the shard
            went back, and who has not come since: no round is opened over it.
        newest: the last iteration of which a round was opened; −1 before the first.
    """

    def __init__(self, settings: GroupSettings, clock: Callable[[], float] = time.monotonic) -> None:
        """Nobody takes part yet."""
        self._settings, self._clock = settings, clock
        self._times = StepTimes()
        self._began: dict[str, float] = {}
        self._open: dict[int, list[Round]] = {}
        self.reached: dict[str, int] = {}
        self.newest = -1

    def enter(self, worker: str) -> None:
        """Take a worker in; it takes part from the next round that is opened."""
        self.reached[worker] = self.newest
        self._began[worker] = self._clock()

    def leave(self, worker: str) -> None:
        """Let a worker go; nobody waits for it any more."""
        del self.reached[worker]
        self._began.pop(worker, None)
        self._times.forget(worker)
        for round_ in self._rounds():
            self._strike(round_, worker)

    def arrive(self, worker: str, iteration: int) -> bool:
        """Take a push in; tell whether the worker waits now. If not, its round is frozen, or went on without it."""
        now = self._clock()
        self._times.saw(worker, now - self._began.get(worker, now))
        self._began[worker] = now
        self.reached[worker] = iteration
        for round_ in self._rounds():
            if round_.iteration < iteration:
                self._strike(round_, worker)
        if iteration > self.newest:
            self._begin(worker, iteration)
        for round_ in self._open.get(iteration, ()):
            if worker in round_.members:
                round_.since = round_.since if round_.fresh else now
                round_.fresh.add(worker)
                return True
        return False

    def waits(self, worker: str) -> Round | None:
        """Return the round that a worker waits for."""
        return next((round_ for round_ in self._rounds() if worker in round_.fresh), None)

    def retry_seconds(self, round_: Round) -> float:
        """Return when to ask again: at the end of the window, or after a share of how long it has taken already."""
        age = self._clock() - round_.since
        wait = _POLL_SHARE * age if round_.is_global else self._times.grace_seconds([*round_.members]) - age
        return min(max(wait, _SHORTEST_POLL_SECONDS), _LONGEST_POLL_SECONDS)

    def due(self) -> Frozen | None:
        """Return a round that is to freeze now; ``None`` where there is none."""
        for round_ in self._rounds():
            if self._is_due(round_):
                return self.decide(round_)
        return None

    def decide(self, round_: Round) -> Frozen:
        """Say over whom a round is averaged if it freezes now."""
        t, tau = round_.iteration, self._settings.tau
        others = sorted(round_.members - round_.fresh)
        stale = [worker for worker in others if t - self.reached[worker] <= tau]
        absent = [worker for worker in others if worker not in stale]
        return Frozen(t, tuple(sorted(round_.fresh)), tuple(stale), tuple(absent))

    def open_round(self, iteration: int, worker: str) -> Round:
        """Return the open round of an iteration in which a worker has come; raises ``ValueError``."""
        for round_ in self._open.get(iteration, ()):
            if worker in round_.fresh:
                return round_
        raise ValueError(f"no round of iteration {iteration} is open in which {worker!r} has come")

    def froze(self, frozen: Frozen) -> None:
        """Close a round: its members go on."""
        round_ = self.open_round(frozen.iteration, frozen.fresh[0])
        self._close(round_)
        now = self._clock()
        for worker in frozen.fresh:
            self._began[worker] = now

    def waiting(self) -> set[str]:
        """Return the workers that wait for their round, or were dropped with it and have not come again."""
        dropped = {worker for worker, iteration in self.reached.items() if iteration == _BEYOND_ALL}
        return dropped.union(*(round_.fresh for round_ in self._rounds()))

    def begin_anew(self, away: Collection[str]) -> None:
        """Let all open rounds go, and open none over these workers until they have come again."""
        self.abandon()
        self.reached |= {worker: _BEYOND_ALL for worker in away if worker in self.reached}

    def abandon(self) -> None:
        """Let all open rounds go: nobody waits any more."""
        self._open.clear()

    def export(self) -> dict[str, Any]:
        """Return everything but times, as JSON can hold it."""
        rounds = [
            {
                "iteration": round_.iteration,
                "members": sorted(round_.members),
                "fresh": sorted(round_.fresh),
                "is_global": round_.is_global,
            }
            for round_ in self._rounds()
        ]
        return {"reached": self.reached, "newest": self.newest, "rounds": rounds}

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Take over what :meth:`export` returned; windows of grace begin anew."""
        self.reached = {str(worker): int(iteration) for worker, iteration in plain["reached"].items()}
        self.newest = int(plain["newest"])
        now = self._clock()
        self._began = dict.fromkeys(self.reached, now)
        for found in plain["rounds"]:
            members, fresh = {*map(str, found["members"])}, {*map(str, found["fresh"])}
            round_ = Round(int(found["iteration"]), members, bool(found["is_global"]), fresh, now)
            self._open.setdefault(round_.iteration, []).append(round_)

    # Inner parts

    def _rounds(self) -> Iterator[Round]:
        for iteration in sorted(self._open):
            yield from [*self._open[iteration]]

    def _begin(self, worker: str, iteration: int) -> None:
        """Open the rounds of an iteration, over those that have not passed it."""
        behind = sorted(other for other, reached in self.reached.items() if other == worker or reached < iteration)
        is_global = self._settings.is_global(iteration)
        self._open[iteration] = [
            Round(iteration, {*group}, is_global) for group in self._settings.groups(behind, iteration)
        ]
        self.newest = iteration

    def _is_due(self, round_: Round) -> bool:
        if not round_.fresh:
            return False
        if round_.members == round_.fresh:
            return True
        if round_.is_global:
            return False
        if all(self.reached[worker] < round_.iteration - 1 for worker in round_.members - round_.fresh):
            return True
        return self._clock() - round_.since >= self._times.grace_seconds([*round_.members])

    def _strike(self, round_: Round, worker: str) -> None:
        """Take a worker out of a round that it will not come to, or is dead for."""
        round_.members.discard(worker)
        round_.fresh.discard(worker)
        if not round_.members:
            self._close(round_)

    def _close(self, round_: Round) -> None:
        rounds = self._open[round_.iteration]
        rounds.remove(round_)
        if not rounds:
            del self._open[round_.iteration]

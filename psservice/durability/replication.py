"""The position of a standby in a shard's journal, and the answers that wait for it.

A standby tells its position in the journal with each request for what follows. With ``--replicate ack`` an answer that
tells of a record waits until the standby has the record, as it waits for the disk with ``--fsync always``. So nothing
that was acknowledged is lost with this machine, and a server whose standby serves in its place by now acknowledges
nothing any more.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pscore.wire.errors import ErrorCode, Rejected
from psservice.storage.journal import Position
from psservice.storage.parts import HeldPart

_SILENT_SECONDS = 5.0  # after which a standby that asks for nothing counts as gone
_LONGEST_WAIT_SECONDS = 10.0  # of an answer, for a standby that is there
_RETRY_SECONDS = 1.0


class StandbyProgress(NamedTuple):
    """How far a standby is: its name, whether it follows now, and what it lacks (bytes, versions, seconds)."""

    standby: str
    is_connected: bool
    behind_bytes: int
    behind_versions: int
    behind_seconds: float


@dataclass(frozen=True, slots=True)
class _Answered:
    """The newest position and version when a standby was last answered: one that has the first has the second."""

    position: Position
    version: int


class Replication:
    """The standby of one shard. Thread-safe; a call owns the lock for no longer than a few comparisons.

    Args:
        is_required: whether answers wait for the standby.
        clock: monotonic seconds.
        waits: whether answers wait in their threads; else they are refused until the standby has what they tell of.
    """

    def __init__(self, clock: Callable[[], float], *, is_required: bool, waits: bool = True) -> None:
        self.is_required, self._clock, self._waits = is_required, clock, waits
        self._standby, self._heard_at = "", -math.inf
        self._position, self._version = Position(), 0
        self._generation, self._mark = 0, b""  # of the newest snapshot; of the segment that was compared
        self._parted_generation, self._parted_at = 0, Position()
        self._answered = _Answered(Position(), 0)
        self._whole_at = clock()  # when the standby last had everything
        self._changed = threading.Condition()

    def begin(self, generation: int) -> None:
        """Note the generation of the newest snapshot: a standby without one of it has nothing of this model."""
        with self._changed:
            if generation != self._generation:
                self._generation, self._mark, self._position = generation, b"", Position()

    def part(self, generation: int, end: Position) -> None:
        """Note that this server has left a history at an end of the journal behind which something may be lost."""
        with self._changed:
            self._parted_generation, self._parted_at = generation, end

    def hear(self, standby: str, held: HeldPart) -> None:
        """Note the part of a standby, which counts once its segment was compared: see :meth:`compared`.

        Raises :class:`Rejected`: ``BUSY`` if another one follows, ``STANDBY_AHEAD`` if it has bytes that are lost here.
        """
        with self._changed:
            now = self._clock()
            if held.generation and held.generation == self._parted_generation and held.position > self._parted_at:
                raise Rejected(
                    ErrorCode.STANDBY_AHEAD,
                    f"this server came back with the journal up to {_shown(self._parted_at)}, and standby {standby!r} "
                    f"has it up to {_shown(held.position)}: to follow would drop what may have been acknowledged",
                )
            if standby != self._standby and self._is_connected(now):
                raise Rejected(
                    ErrorCode.BUSY,
                    f"standby {self._standby!r} follows this shard already; a shard has one",
                    retry_seconds=_RETRY_SECONDS,
                )
            self._standby, self._heard_at = standby, now
            self._count(held.position if self._is_compared(held) else Position())

    def is_compared(self, held: HeldPart) -> bool:
        """Tell whether a part is known to be of this journal and of its newest model."""
        with self._changed:
            return self._is_compared(held)

    def compared(self, held: HeldPart) -> None:
        """Note that a part is of this journal: the marks of its segment are equal."""
        with self._changed:
            if held.generation and held.generation == self._generation:
                self._mark = held.mark
                self._count(held.position)

    def _is_compared(self, held: HeldPart) -> bool:
        has_mark = bool(held.mark) or not held.position.offset
        return has_mark and (held.mark, held.generation) == (self._mark, self._generation)

    def _count(self, position: Position) -> None:
        self._position = position
        if position >= self._answered.position:
            self._version, self._whole_at = self._answered.version, self._clock()
        self._changed.notify_all()

    def answer(self, newest: Position, version: int) -> None:
        """Note the newest position and version as a standby is answered; its next request tells whether it has them."""
        with self._changed:
            self._heard_at = self._clock()  # it reads the answer
            self._answered = _Answered(newest, version)

    def forget(self) -> None:
        """Count the standby as gone: it has said that it serves by now."""
        with self._changed:
            self._heard_at = -math.inf
            self._changed.notify_all()

    def wait(self, position: Position) -> None:
        """Wait until the standby has the journal up to a position, if answers wait for it.

        Raises :class:`Rejected` (``NO_STANDBY``) if there is none, or it is too slow.
        """
        if not self.is_required:
            return
        end = self._clock() + _LONGEST_WAIT_SECONDS
        with self._changed:
            while self._position < position:
                now = self._clock()
                if not self._is_connected(now):
                    raise self._refusal("no standby follows this shard")
                if now >= end or not self._waits:
                    raise self._refusal(f"standby {self._standby!r} has not got it yet")
                self._changed.wait(min(1.0, end - now))

    def keep_from(self) -> int | None:
        """Return the first segment that the standby may still ask for; ``None`` if no standby follows."""
        with self._changed:
            return self._position.segment if self._is_connected(self._clock()) else None

    def progress(self, newest: Position, version: int) -> StandbyProgress:
        """Return how far the standby is from the newest position and version.

        If it has all of the journal, it is noted to have the version too: it may have answered between the writing of
        its last bytes and the new version.
        """
        with self._changed:
            now, position = self._clock(), self._position
            is_whole = position >= newest
            if is_whole:
                self._version = version
            same_segment = position.segment == newest.segment
            return StandbyProgress(
                self._standby,
                self._is_connected(now),
                max(0, newest.offset - (position.offset if same_segment else 0)),
                0 if is_whole else max(0, version - self._version),
                0.0 if is_whole else now - self._whole_at,
            )

    def _is_connected(self, now: float) -> bool:
        return now - self._heard_at < _SILENT_SECONDS

    @staticmethod
    def _refusal(why: str) -> Rejected:
        what = "and answers wait for one (--replicate ack)"
        return Rejected(ErrorCode.NO_STANDBY, f"{why}, {what}", retry_seconds=_RETRY_SECONDS)


def _shown(position: Position) -> str:
    return f"byte {position.offset} of segment {position.segment}"

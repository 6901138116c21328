"""What befalls the followers of a feed that have a directory, beside what befalls all of them."""

import random
import resource
from contextlib import suppress
from typing import TYPE_CHECKING

from verify.cluster.waiting import await_unfinished
from verify.failpoint import limits
from verify.failpoint.draws import drawn

if TYPE_CHECKING:
    from verify.feeds import Feeds

_UP_SECONDS = 0.5, 3.5
_STAGE_SECONDS, _WRITING_SECONDS = 3.0, 0.02
_FULL_SECONDS, _ROOM_BYTES = (0.5, 1.5), 48 << 10
"""Less than the file of any model, and more than the notes of a life."""


class FeedFollowerFaults:
    """Draws faults until it is told to end.

    Args:
        feeds: the campaign.
        rng: draws.
    """

    def __init__(self, feeds: "Feeds", rng: random.Random) -> None:
        self._feeds, self._rng = feeds, rng
        self._readers, self._faults = feeds.readers, feeds.result.faults

    def strike(self) -> None:
        """Do them, one by one; every follower lives when this returns."""
        ways = drawn([(1, self._kill_follower_in_stage), (1, self._fill_follower)], self._rng)
        while not self._feeds.is_over.wait(self._rng.uniform(*_UP_SECONDS)):
            next(ways)()

    def _kill_follower_in_stage(self) -> None:
        """Kill a follower when it has begun to write the files of a version, or soon after: at its commit."""
        number = self._directory()
        out = self._readers.out(number)
        assert out is not None
        begun = await_unfinished(out, _STAGE_SECONDS) if out.is_dir() else None
        if begun is not None:
            self._feeds.pause(0.0, self._rng.choice((0.0, _WRITING_SECONDS)))
        half = begun is not None and begun.exists()
        self._readers.kill(number)
        self._faults["followers killed while they wrote files" if half else "followers killed"] += 1

    def _fill_follower(self) -> None:
        """Let a follower's files not grow for a while, as on a full disk."""
        self._faults["followers without room"] += 1
        with (
            suppress(ProcessLookupError),  # somebody else may kill it meanwhile
            limits.lowered(self._readers.pid(self._directory()), resource.RLIMIT_FSIZE, _ROOM_BYTES),
        ):
            self._feeds.pause(*_FULL_SECONDS)

    def _directory(self) -> int:
        return self._rng.choice([number for number in range(len(self._readers)) if self._readers.out(number)])

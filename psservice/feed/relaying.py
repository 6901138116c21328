"""How a relay follows its source: what each shard has of the source's cuts, as shard 0 knows it, and how far behind."""

import threading
from collections.abc import Callable, Collection

from pscore.reader.cut import Cut

MOST_RELAYS = 1024
"""Relays that are told to the source, at most."""

_GONE_SECONDS = 60.0  # without a question, after which a relay follows no longer


class Relaying:
    """The cut that every shard is to stage, and what the shards have. Read and written by any thread.

    Args:
        num_shards: of the relay.
        identity: of this process, unlike any other's.
        clock: counts seconds.

    Attributes:
        target: the cut; on shard 0 the source's newest, on the others what shard 0 has told; ``None`` before.
        aimed: set when there is another target.
        failed: the name of the cut that this shard has tried to fetch last, and could not; empty if it could.
        error: why the source is not followed; empty while it is.
    """

    def __init__(self, num_shards: int, identity: str, clock: Callable[[], float]) -> None:
        self.identity, self._clock = identity, clock
        self._others = range(1, num_shards)
        self._has: dict[int, frozenset[str]] = {}  # by the shard's index: names of cuts
        self._failed: dict[int, str] = {}
        self._relays: dict[str, float] = {}  # that follow this one: when they have asked last
        self._lost_at: float | None = None
        self._behind_since: float | None = None
        self._newest: Cut | None = None  # that is known
        self._published = ""
        self.target: Cut | None = None
        self.aimed = threading.Event()
        self.failed = self.error = ""

    def aim(self, cut: Cut) -> None:
        """Name the cut that every shard is to stage; on shard 0, what shards could not fetch is forgotten."""
        self._failed.clear()
        if cut != self.target:
            if cut.name != self._published and self._behind_since is None:
                self._behind_since = self._clock()
            self.target = self._newest = cut
            self.aimed.set()

    def aim_at_nothing(self) -> None:
        """Stage nothing until shard 0 names a cut: it may have begun anew, and publish what it hears of next."""
        self.target = None

    def source_version(self, index: int) -> int:
        """Return the newest version of a shard at the source that is known; 0 if none is."""
        newest = self._newest
        return newest.shards[index].version if newest is not None and index < len(newest.shards) else 0

    def publish(self, name: str) -> None:
        """Note the cut that readers get here from now on."""
        self._published = name
        if self._newest is not None and self._newest.name == name:
            self._behind_since = None

    def hear(self, index: int, has: Collection[str], failed: str) -> None:
        """Note which cuts another shard has, published or staged, and which one it could not fetch; on shard 0."""
        if index in self._others:
            self._has[index], self._failed[index] = frozenset(has), failed

    def others_have(self, name: str) -> bool:
        """Tell whether every other shard has a cut, published or staged; on shard 0."""
        return all(name in self._has.get(index, ()) for index in self._others)

    def some_failed(self, name: str) -> bool:
        """Tell whether another shard could not fetch a cut; on shard 0."""
        return any(self._failed.get(index) == name for index in self._others)

    # Relays of this one

    def hear_of_relays(self, identities: Collection[str]) -> None:
        """Note relays that follow this one, directly or by others; on shard 0."""
        self._relays |= dict.fromkeys({*identities} - {self.identity}, self._clock())
        if len(self._relays) > 2 * MOST_RELAYS:  # nobody may have asked for them for long
            self.relays()

    def relays(self) -> list[str]:
        """Return this relay and those that follow it, the last to ask first."""
        oldest = self._clock() - _GONE_SECONDS
        known = [(each, asked) for each, asked in [*self._relays.items()] if asked > oldest]
        newest = sorted(known, key=lambda each: each[1], reverse=True)[: MOST_RELAYS - 1]
        self._relays = dict(newest)
        return [self.identity, *self._relays]

    # The source

    def lose(self, why: str) -> None:
        """Note that the source is not followed."""
        self._lost_at = self._clock() if self._lost_at is None else self._lost_at
        self.error = why

    def find(self) -> bool:
        """Note that the source is followed; return whether it was not."""
        was_lost = self._lost_at is not None
        self._lost_at, self.error = None, ""
        return was_lost

    @property
    def lost_seconds(self) -> float:
        """For how long the source has not been followed; 0 while it is."""
        lost_at = self._lost_at
        return 0.0 if lost_at is None else self._clock() - lost_at

    @property
    def behind_seconds(self) -> float:
        """For how long readers have lacked the newest cut of the source that is known; 0 if they have it."""
        since = self._behind_since
        return 0.0 if since is None else self._clock() - since

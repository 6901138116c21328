"""One epoch of a dataset: each of its places is in one state, and leaves the epoch only by being finished.

A place is fresh, held by one worker, returned by one that is gone, or finished; never two of these. It is finished when
a push of its holder that names it is applied. Every operation returns the epoch afterwards.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from pscore.model.ranges import Ranges
from psservice.types import Identity

MOST_GRANTED = 64
"""Ranges handed out at once; more than one only where workers that are gone have left pieces."""

Shares = Mapping[Identity, Ranges]


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch that is not finished: places from ``fresh`` on were never leased; longest returned come first."""

    fresh: int = 0
    held: Shares = field(default_factory=dict)
    returned: Shares = field(default_factory=dict)

    def left(self, size: int) -> int:
        """Count what can be handed out."""
        return size - self.fresh + sum(ranges.total for ranges in self.returned.values())

    def is_finished(self, size: int) -> bool:
        """Tell whether every place is finished."""
        return self.fresh == size and not self.held and not self.returned

    def held_by_others(self, identity: Identity) -> int:
        """Count the places of other workers."""
        return sum(ranges.total for holder, ranges in self.held.items() if holder != identity)

    def without(self, gone: Set[Identity]) -> "Epoch":
        """Return the places of these workers."""
        held, returned = dict(self.held), dict(self.returned)
        for holder in [each for each in held if each in gone]:
            returned[holder] = held.pop(holder) | returned.get(holder, Ranges())
        return replace(self, held=held, returned=returned)

    def claimed(self, identity: Identity, ranges: Ranges) -> "Epoch":
        """Let a worker that was thought dead keep what no other worker has been given meanwhile."""
        kept = self.returned.get(identity, Ranges()) & ranges
        return replace(self, held=_with(self.held, identity, kept), returned=_less(self.returned, identity, kept))

    def given(self, identity: Identity, ranges: Ranges) -> "Epoch":
        """Hand places out that are fresh or returned."""
        returned = {holder: left for holder, before in self.returned.items() if (left := before - ranges)}
        fresh = max([self.fresh, *(end for _, end in ranges)])
        return Epoch(fresh, _with(self.held, identity, ranges), returned)

    def finished(self, identity: Identity, ranges: Ranges) -> "Epoch":
        """Finish those of these places that this worker holds, or held and that were handed to no one since."""
        return replace(self, held=_less(self.held, identity, ranges), returned=_less(self.returned, identity, ranges))

    def choose(self, count: int, size: int) -> Ranges:
        """Pick places to hand out: returned ones first, then fresh ones."""
        chosen = Ranges()
        for ranges in self.returned.values():
            chosen = chosen | ranges.first(count - chosen.total)
        chosen = Ranges(chosen.pairs[:MOST_GRANTED])
        return chosen | Ranges([(self.fresh, min(size, self.fresh + max(0, count - chosen.total)))])


def _with(shares: Shares, identity: Identity, ranges: Ranges) -> Shares:
    more = shares.get(identity, Ranges()) | ranges
    return {**shares, identity: more} if more else shares


def _less(shares: Shares, identity: Identity, ranges: Ranges) -> Shares:
    changed = {**shares, identity: shares.get(identity, Ranges()) - ranges}
    return {holder: each for holder, each in changed.items() if each}

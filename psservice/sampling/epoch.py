"""One epoch of a dataset: each of its places is in one state, and leaves the epoch only by being finished.

A place is fresh, held by one worker, returned by one that is gone, or finished; it never is two of these. It is
finished when a push of its holder that names it is applied.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace

from pscore.model.ranges import Ranges
from psservice.cluster.leases import Identity

MOST_GRANTED = 64
"""Ranges handed out at once; more than one only where workers that are gone have left pieces."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch that is not finished.

    Attributes:
        fresh: every place from here on has never been handed out.
        held: by whom.
        returned: unfinished places of workers that are gone, longest gone first.
    """

    fresh: int = 0
    held: Mapping[Identity, Ranges] = field(default_factory=dict)
    returned: Mapping[Identity, Ranges] = field(default_factory=dict)

    def left(self, size: int) -> int:
        """Count what can be handed out."""
        return size - self.fresh + sum(ranges.total for ranges in self.returned.values())

    def is_finished(self, size: int) -> bool:
        """Tell whether every place is finished."""
        return self.fresh == size and not self.held and not self.returned

    def elsewhere(self, identity: Identity) -> int:
        """Count what others hold."""
        return sum(ranges.total for holder, ranges in self.held.items() if holder != identity)

    def without(self, gone: Set[Identity]) -> "Epoch":
        """Take back what these workers hold."""
        back = {
            holder: ranges | self.returned.get(holder, Ranges())
            for holder, ranges in self.held.items()
            if holder in gone
        }
        held = {holder: ranges for holder, ranges in self.held.items() if holder not in gone}
        return replace(self, held=held, returned={**self.returned, **back})

    def claimed(self, identity: Identity, ranges: Ranges) -> "Epoch":
        """Let a worker that was thought dead keep what nobody has taken meanwhile."""
        kept = self.returned.get(identity, Ranges()) & ranges
        return replace(
            self,
            held=_changed(self.held, identity, lambda before: before | kept),
            returned=_changed(self.returned, identity, lambda before: before - kept),
        )

    def given(self, identity: Identity, ranges: Ranges) -> "Epoch":
        """Hand places out that are fresh or returned."""
        returned = {holder: left for holder, before in self.returned.items() if (left := before - ranges)}
        fresh = max([self.fresh, *(end for _, end in ranges)])
        return Epoch(fresh, _changed(self.held, identity, lambda before: before | ranges), returned)

    def finished(self, identity: Identity, ranges: Ranges) -> "Epoch":
        """Finish what of these places is this worker's, or was and is nobody's since."""
        return replace(
            self,
            held=_changed(self.held, identity, lambda before: before - ranges),
            returned=_changed(self.returned, identity, lambda before: before - ranges),
        )

    def choose(self, count: int, size: int) -> Ranges:
        """Pick places to hand out: returned ones first, then fresh ones."""
        chosen = Ranges()
        for ranges in self.returned.values():
            chosen = chosen | ranges.first(count - chosen.total)
        chosen = Ranges(chosen.pairs[:MOST_GRANTED])
        return chosen | Ranges([(self.fresh, min(size, self.fresh + max(0, count - chosen.total)))])


def _changed(
    shares: Mapping[Identity, Ranges], identity: Identity, change: Callable[[Ranges], Ranges]
) -> dict[Identity, Ranges]:
    """Return shares with one of them changed, and without it where nothing is left."""
    ranges = change(shares.get(identity, Ranges()))
    if ranges:
        return {**shares, identity: ranges}
    return {holder: each for holder, each in shares.items() if holder != identity}

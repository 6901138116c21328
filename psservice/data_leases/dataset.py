"""Which samples of which epoch are whose: data that workers are leased in shares, while they join, leave and fail.

A dataset is a size; an epoch is every place in its order once. Workers know the order, this room only places. A place
is fresh, held by one worker, returned by one that is gone, or finished; never two of these. It is finished when a push
of its holder that names it is applied. Operations return the epoch or dataset afterwards, so that a caller can journal
a change before the change is made. Their order is that of the shard's apply thread.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from pscore.model.ranges import Ranges
from pscore.wire.errors import ErrorCode, Rejected
from psservice.values import Identity

MOST_DATASETS = 64
"""Datasets of a run."""

MOST_SIZE, MOST_EPOCHS, MOST_SAMPLES = 1 << 48, 1 << 32, 1 << 24
"""Samples of a dataset, its epochs, and samples that one call may ask for."""

MOST_RANGES = 4096
"""Ranges that a worker may hold of a dataset, and that one message may name."""

_MOST_GRANTED = 64  # ranges handed out at once; more than one only if workers that are gone have left pieces
_MOST_UNFINISHED = 64  # epochs at once: a worker that finishes nothing must not fill the memory with them
_SMALLEST = 8  # samples, at the end of an epoch, if the worker has asked for many: a call for each is too dear

_NONE = Ranges()

Share = Mapping[int, Ranges]
"""Places by epoch."""

_Holders = Mapping[Identity, Ranges]


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch that is not finished: places from ``fresh`` on were never leased; longest returned come first."""

    fresh: int = 0
    held: _Holders = field(default_factory=dict)
    returned: _Holders = field(default_factory=dict)

    def left(self, size: int) -> int:
        """Count what can be handed out."""
        return size - self.fresh + sum(ranges.total for ranges in self.returned.values())

    def is_finished(self, size: int) -> bool:
        """Tell whether every place is finished."""
        return self.fresh == size and not self.held and not self.returned

    def held_by_others(self, identity: Identity) -> int:
        """Count the places of other workers."""
        return sum(ranges.total for holder, ranges in self.held.items() if holder != identity)

    def settled(self, identity: Identity, claim: Ranges, gone: Set[Identity]) -> "Epoch":
        """Return the places of workers that are gone, then let ``identity`` keep what of its claim nobody has."""
        held, returned = dict(self.held), dict(self.returned)
        for holder in [each for each in held if each in gone]:
            returned[holder] = held.pop(holder) | returned.get(holder, _NONE)
        kept = returned.get(identity, _NONE) & claim
        return replace(self, held=_added(held, identity, kept), returned=_removed(returned, identity, kept))

    def given(self, identity: Identity, ranges: Ranges) -> "Epoch":
        """Hand places out that are fresh or returned."""
        returned = {holder: left for holder, before in self.returned.items() if (left := before - ranges)}
        fresh = max([self.fresh, *(end for _, end in ranges)])
        return Epoch(fresh, _added(self.held, identity, ranges), returned)

    def finished(self, identity: Identity, ranges: Ranges) -> "Epoch":
        """Finish those of these places that this worker holds, or held and that were handed to no one since."""
        held, returned = _removed(self.held, identity, ranges), _removed(self.returned, identity, ranges)
        return replace(self, held=held, returned=returned)

    def choose(self, count: int, size: int) -> Ranges:
        """Pick places to hand out: returned ones first, then fresh ones."""
        chosen = Ranges()
        for ranges in self.returned.values():
            chosen = chosen | ranges.first(count - chosen.total)
        chosen = Ranges(chosen.pairs[:_MOST_GRANTED])
        return chosen | Ranges([(self.fresh, min(size, self.fresh + max(0, count - chosen.total)))])


def _added(holders: _Holders, identity: Identity, ranges: Ranges) -> _Holders:
    more = holders.get(identity, _NONE) | ranges
    return {**holders, identity: more} if more else holders


def _removed(holders: _Holders, identity: Identity, ranges: Ranges) -> _Holders:
    changed = {**holders, identity: holders.get(identity, _NONE) - ranges}
    return {holder: each for holder, each in changed.items() if each}


@dataclass(frozen=True, slots=True)
class Plan:
    """What all workers must agree on: samples of the dataset, seed of its order, whether it is shuffled."""

    size: int
    seed: int
    shuffle: bool


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request for samples up to an epoch (``None``: the newest that has begun), with all that the worker holds."""

    dataset: str
    plan: Plan
    epoch: int | None
    samples: int
    held: Share


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset's newest epoch that has begun, and its unfinished epochs by number."""

    plan: Plan
    newest: int
    epochs: Mapping[int, Epoch]

    def held_by(self, identity: Identity) -> dict[int, Ranges]:
        """Return a worker's places."""
        return {number: epoch.held[identity] for number, epoch in self.epochs.items() if identity in epoch.held}

    def settled(self, identity: Identity, claim: Share, gone: Set[Identity]) -> "Dataset":
        """Settle every epoch."""
        epochs = {n: each.settled(identity, claim.get(n, _NONE), gone) for n, each in self.epochs.items()}
        return replace(self, epochs=epochs)

    def given(self, identity: Identity, share: Share) -> "Dataset":
        """Hand places out; an epoch begins with its first."""
        epochs = dict(self.epochs)
        for number, ranges in share.items():
            epochs[number] = epochs.get(number, Epoch()).given(identity, ranges)
        return replace(self, epochs=epochs, newest=max([self.newest, *share]))

    def finished(self, identity: Identity, share: Share) -> "Dataset":
        """Finish those of these places that are a worker's (``BAD_REQUEST``: more pieces than honest workers leave)."""
        epochs = {n: each.finished(identity, share.get(n, _NONE)) for n, each in self.epochs.items()}
        pieces = [places.get(identity, _NONE) for each in epochs.values() for places in (each.held, each.returned)]
        if sum(map(len, pieces)) > MOST_RANGES:
            raise Rejected(
                ErrorCode.BAD_REQUEST, f"the samples that are reported finished leave more than {MOST_RANGES} pieces"
            )
        return replace(self, epochs={n: each for n, each in epochs.items() if not each.is_finished(self.plan.size)})

    def share_for(self, identity: Identity, request: SampleRequest, live: int) -> dict[int, Ranges]:
        """Choose places for a worker: of the oldest epoch first, fewer if little is left of it."""
        if not request.samples or sum(map(len, self.held_by(identity).values())) > MOST_RANGES - _MOST_GRANTED:
            return {}
        goal = self.newest if request.epoch is None else request.epoch
        open_epochs = dict(self.epochs)
        if goal > self.newest and len(open_epochs) < _MOST_UNFINISHED:
            open_epochs[self.newest + 1] = Epoch()
        for number in sorted(open_epochs):
            left = open_epochs[number].left(self.plan.size)
            if number <= goal and left:
                fair = -(-left // (2 * max(1, live)))
                count = min(request.samples, max(fair, min(_SMALLEST, request.samples // 16)))
                return {number: open_epochs[number].choose(count, self.plan.size)}
        return {}


@dataclass(frozen=True, slots=True)
class Leased:
    """The answer to a request; see ``LeaseSamplesResponse``.

    ``after`` is the dataset once the places of workers that are ``gone`` were returned, to be journaled if ``changed``.
    """

    granted: Share
    lost: Share
    held_by_others: int
    gone: frozenset[Identity]
    after: Dataset
    changed: bool


class Datasets(dict[str, Dataset]):
    """The datasets of a run, by name. Belongs to the apply thread; its caller makes a change with ``update``."""

    def lease(self, identity: Identity, request: SampleRequest, live: Set[Identity]) -> Leased:
        """Answer a live worker's request, and change nothing (``SETTINGS_MISMATCH``, ``BAD_REQUEST``)."""
        before = self._named(request)
        for setting in ("size", "seed", "shuffle"):
            ours, theirs = getattr(before.plan, setting), getattr(request.plan, setting)
            if ours != theirs:
                raise Rejected(
                    ErrorCode.SETTINGS_MISMATCH,
                    f"dataset {request.dataset!r} of this run has {setting} {ours}, the worker's has {theirs}",
                    setting=setting,
                )
        gone = frozenset(holder for epoch in before.epochs.values() for holder in epoch.held) - live
        now = before.settled(identity, request.held, gone)
        granted = _less(now.held_by(identity), request.held)  # an answer that was lost
        if not granted:
            granted = now.share_for(identity, request, len(live))
        now = now.given(identity, granted)
        goal = now.newest if request.epoch is None else request.epoch
        others = sum(each.held_by_others(identity) for number, each in now.epochs.items() if number <= goal)
        lost = _less(request.held, now.held_by(identity))
        return Leased(granted, lost, others, gone, now, now != self.get(request.dataset))

    def apply(self, identity: Identity, request: SampleRequest, granted: Share, gone: Set[Identity]) -> None:
        """Make a change that :meth:`lease` has decided."""
        self[request.dataset] = self._named(request).settled(identity, request.held, gone).given(identity, granted)

    def finish(self, identity: Identity, finished: Mapping[str, Share]) -> dict[str, Dataset]:
        """Return the datasets after a worker has finished samples, and change nothing (``BAD_REQUEST``)."""
        return {name: self[name].finished(identity, share) for name, share in finished.items() if name in self}

    def _named(self, request: SampleRequest) -> Dataset:
        """Return a dataset; a new one begins at the worker's epoch: without a journal, those before are forgotten."""
        if request.dataset not in self and len(self) >= MOST_DATASETS:
            raise Rejected(ErrorCode.BAD_REQUEST, f"a run has at most {MOST_DATASETS} datasets; use one name for one")
        epoch = request.epoch or 0
        return self.get(request.dataset) or Dataset(request.plan, epoch, {epoch: Epoch()})


def _less(share: Share, other: Share) -> dict[int, Ranges]:
    return {n: rest for n, ranges in sorted(share.items()) if (rest := ranges - other.get(n, _NONE))}

"""Which samples of which epoch are whose: data that workers are leased in shares, while they come and go.

A dataset is a size; an epoch (:mod:`psservice.sampling.epoch`) is every place in its order once. Workers know the
order, this room only places. Operations return the dataset afterwards, so that a caller can journal a change before the
change is made. Their order is that of the shard's writer thread.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

from pscore.model.ranges import Ranges
from pscore.wire.errors import ErrorCode, Rejected
from psservice.sampling.epoch import MOST_GRANTED, Epoch
from psservice.types import Identity

MOST_DATASETS = 64
"""Datasets of a run."""

MOST_SIZE, MOST_EPOCHS, MOST_SAMPLES = 1 << 48, 1 << 32, 1 << 24
"""Samples of a dataset, its epochs, and samples that one call may ask for."""

MOST_RANGES = 4096
"""Ranges that a worker may hold of a dataset, and that one message may name."""

_MOST_UNFINISHED = 64  # epochs at once: a worker that finishes nothing must not fill the memory with them
_SMALLEST = 8  # samples, at the end of an epoch, where the worker has asked for many: a call for each is too dear

Share = Mapping[int, Ranges]
"""Places by epoch."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What all workers must agree on: samples of the dataset, seed of its order, whether it is shuffled."""

    size: int
    seed: int
    shuffle: bool


@dataclass(frozen=True, slots=True)
class Wish:
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

    @property
    def holders(self) -> frozenset[Identity]:
        """Workers that hold any place."""
        return frozenset(holder for epoch in self.epochs.values() for holder in epoch.held)

    def held_by(self, identity: Identity) -> dict[int, Ranges]:
        """Return a worker's places."""
        return {number: epoch.held[identity] for number, epoch in self.epochs.items() if identity in epoch.held}

    def settled(self, identity: Identity, claim: Share, gone: Set[Identity]) -> "Dataset":
        """Return the places of workers that are gone, then let ``identity`` keep what of its claim nobody has."""
        epochs = {number: epoch.without(gone) for number, epoch in self.epochs.items()}
        for number, ranges in claim.items():
            if number in epochs:
                epochs[number] = epochs[number].claimed(identity, ranges)
        return replace(self, epochs=epochs)

    def given(self, identity: Identity, share: Share) -> "Dataset":
        """Hand places out; an epoch begins with its first."""
        epochs = dict(self.epochs)
        for number, ranges in share.items():
            epochs[number] = epochs.get(number, Epoch()).given(identity, ranges)
        return replace(self, epochs=epochs, newest=max([self.newest, *share]))

    def finished(self, identity: Identity, share: Share) -> "Dataset":
        """Finish those of these places that are a worker's (``BAD_REQUEST``: more pieces than honest workers leave)."""
        epochs = dict(self.epochs)
        for number, ranges in share.items():
            if number in epochs:
                epochs[number] = epochs[number].finished(identity, ranges)
        after = replace(self, epochs={n: epoch for n, epoch in epochs.items() if not epoch.is_finished(self.plan.size)})
        shares = [shares.get(identity, Ranges()) for each in epochs.values() for shares in (each.held, each.returned)]
        if sum(map(len, shares)) > MOST_RANGES:
            raise Rejected(
                ErrorCode.BAD_REQUEST, f"the samples that are reported finished leave more than {MOST_RANGES} pieces"
            )
        return after

    def share_for(self, identity: Identity, wish: Wish, live: int) -> dict[int, Ranges]:
        """Choose places for a worker: of the oldest epoch first, fewer where little is left of it."""
        if not wish.samples or sum(map(len, self.held_by(identity).values())) > MOST_RANGES - MOST_GRANTED:
            return {}
        goal = self.newest if wish.epoch is None else wish.epoch
        open_epochs = dict(self.epochs)
        if goal > self.newest and len(open_epochs) < _MOST_UNFINISHED:
            open_epochs[self.newest + 1] = Epoch()
        for number in sorted(open_epochs):
            left = open_epochs[number].left(self.plan.size)
            if number <= goal and left:
                fair = -(-left // (2 * max(1, live)))
                count = min(wish.samples, max(fair, min(_SMALLEST, wish.samples // 16)))
                return {number: open_epochs[number].choose(count, self.plan.size)}
        return {}


@dataclass(frozen=True, slots=True)
class Leased:
    """The answer to a wish; see ``LeaseSamplesResponse``.

    ``after`` is the dataset once the places of workers that are ``gone`` were returned, to be journaled if ``changed``.
    """

    granted: Share
    lost: Share
    held_by_others: int
    gone: frozenset[Identity]
    after: Dataset
    changed: bool


class Datasets:
    """The datasets of a run, by name. Belongs to the apply thread."""

    def __init__(self, known: Mapping[str, Dataset] | None = None) -> None:
        self._known = dict(known or {})

    def lease(self, identity: Identity, wish: Wish, live: Set[Identity]) -> Leased:
        """Answer a live worker's wish (``SETTINGS_MISMATCH``, ``BAD_REQUEST``); :meth:`put` makes the change."""
        before = self._named(wish)
        for setting in ("size", "seed", "shuffle"):
            ours, theirs = getattr(before.plan, setting), getattr(wish.plan, setting)
            if ours != theirs:
                raise Rejected(
                    ErrorCode.SETTINGS_MISMATCH,
                    f"dataset {wish.dataset!r} of this run has {setting} {ours}, the worker's has {theirs}",
                    setting=setting,
                )
        gone = before.holders - live
        now = before.settled(identity, wish.held, gone)
        granted = _less(now.held_by(identity), wish.held)  # an answer that was lost
        if not granted:
            granted = now.share_for(identity, wish, len(live))
        now = now.given(identity, granted)
        goal = now.newest if wish.epoch is None else wish.epoch
        others = sum(each.held_by_others(identity) for number, each in now.epochs.items() if number <= goal)
        lost = _less(wish.held, now.held_by(identity))
        return Leased(granted, lost, others, gone, now, now != self._known.get(wish.dataset))

    def redo(self, identity: Identity, wish: Wish, granted: Share, gone: Set[Identity]) -> None:
        """Repeat a change that :meth:`lease` once decided."""
        self.put({wish.dataset: self._named(wish).settled(identity, wish.held, gone).given(identity, granted)})

    def finish(self, identity: Identity, finished: Mapping[str, Share]) -> dict[str, Dataset]:
        """Return the datasets after a worker has finished samples (``BAD_REQUEST``); :meth:`put` makes the change."""
        return {
            name: self._known[name].finished(identity, share) for name, share in finished.items() if name in self._known
        }

    def put(self, after: Mapping[str, Dataset]) -> None:
        """Replace datasets."""
        self._known.update(after)

    def all(self) -> dict[str, Dataset]:
        """Return every dataset by name."""
        return dict(self._known)

    def _named(self, wish: Wish) -> Dataset:
        """Return a dataset; a new one begins at the worker's epoch: without a journal, those before are forgotten."""
        if wish.dataset not in self._known and len(self._known) >= MOST_DATASETS:
            raise Rejected(ErrorCode.BAD_REQUEST, f"a run has at most {MOST_DATASETS} datasets; use one name for one")
        epoch = wish.epoch or 0
        return self._known.get(wish.dataset) or Dataset(wish.plan, epoch, {epoch: Epoch()})


def _less(share: Share, other: Share) -> dict[int, Ranges]:
    return {n: rest for n, ranges in sorted(share.items()) if (rest := ranges - other.get(n, Ranges()))}

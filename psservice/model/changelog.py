"""Which indices each recent version changed.

An exact reply costs what changed, never n, and needs no memory per worker: the union of the changes since any worker's
version is enough, because a reply sends values, not differences.
"""

import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from psservice.model import union_loops
from psservice.rules.changed import ChangedIndices

_MOST_VERSIONS = 100_000  # a bound on what empty pushes may cost; real ones reach the entry limit long before
ALMOST_ALL = 0.8
"""Share of n from which on a change counts as one of everything: values alone are fewer bytes than with offsets."""
_SCAN_FROM = 1 / 256  # share of n from which marking and scanning a bitmap of n bits beats sorting (measured)


class Change(NamedTuple):
    """The elements that a version has changed, and the version before."""

    before: int
    version: int
    changed: ChangedIndices


class ChangeLog:
    """The changes of recent versions, at most ``entry_limit`` offsets, oldest dropped first. Thread-safe.

    Attributes:
        appended: changes recorded ever; grows before the version does.
        began: the version that the log began with: changes up to there were never in it.
        covered_from: every change after this version is recorded.
    """

    def __init__(self, size: int, entry_limit: int, version: int = 0) -> None:
        self._size, self._entry_limit = size, entry_limit
        self._changes: deque[tuple[int, ChangedIndices]] = deque()
        self._entries = self.appended = 0
        self.began = self.covered_from = version
        self._lock = threading.Lock()

    def append(self, version: int, changed: ChangedIndices) -> None:
        """Record what ``version`` changed; versions come in order."""
        if changed is not None and changed.numel() >= ALMOST_ALL * self._size:
            changed = None
        with self._lock:
            self._changes.append((version, changed))
            self.appended += 1
            self._entries += 0 if changed is None else changed.numel()
            while self._entries > self._entry_limit or len(self._changes) > _MOST_VERSIONS:
                dropped, old = self._changes.popleft()
                self._entries -= 0 if old is None else old.numel()
                self.covered_from = dropped

    @property
    def room(self) -> int:
        """Entries that may still be added without dropping others."""
        return self._entry_limit - self._entries

    def all(self) -> list[tuple[int, ChangedIndices]]:
        """Return all recorded versions, in order, and what they changed."""
        with self._lock:
            return list(self._changes)

    def reach_back(self, changes: Sequence[Change]) -> None:
        """Prepend the changes of older versions, in order, up to where this log begins; within the limit."""
        with self._lock:
            for before, version, changed in reversed(changes):
                size = 0 if changed is None else changed.numel()
                room = self._entries + size <= self._entry_limit and len(self._changes) < _MOST_VERSIONS
                if version != self.covered_from or not room:
                    return
                self._changes.appendleft((version, changed))
                self._entries += size
                self.began = self.covered_from = before

    def since(self, version: int) -> list[ChangedIndices] | None:
        """Return the changes of every version after ``version``; ``None`` if some of them are dropped."""
        with self._lock:
            if version < self.covered_from:
                return None
            count = 0
            for recorded, _ in reversed(self._changes):
                if recorded <= version:
                    break
                count += 1
            return self._last(count)

    def between(self, version: int, until: int) -> list[ChangedIndices] | None:
        """Return the changes of every version after ``version``, up to ``until``; ``None`` if some are dropped."""
        with self._lock:
            if version < self.covered_from:
                return None
            return [changed for recorded, changed in self._changes if version < recorded <= until]

    def after(self, position: int) -> list[ChangedIndices] | None:
        """Return what was recorded after the first ``position`` changes; ``None`` if some of that is dropped."""
        with self._lock:
            count = self.appended - position
            return None if count > len(self._changes) else self._last(count)

    def _last(self, count: int) -> list[ChangedIndices]:
        found = [changed for _, changed in islice(reversed(self._changes), count)]
        found.reverse()
        return found


def union(changes: Sequence[ChangedIndices], size: int) -> ChangedIndices:
    """Return the sorted union of changes within a shard of ``size`` elements."""
    known = _known(changes)
    if known is None:
        return None
    if len(known) <= 1:
        return known[0] if known else torch.empty(0, dtype=torch.int64, device="cpu")
    if not _is_scanned(known, size):
        return _sorted_union(known)
    words, count = _bitmap(known, size)
    offsets = np.empty(count, np.int64)
    union_loops.gather.on(count)(words, None, offsets, None)
    return torch.from_numpy(offsets)


def gather(changes: Sequence[ChangedIndices], theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the union of changes (int64, ascending) and a copy of ``theta`` there; ``None`` for every element."""
    known = _known(changes)
    if known is None:
        return None
    if len(known) > 1 and theta.device.type == "cpu" and _is_scanned(known, theta.numel()):
        words, count = _bitmap(known, theta.numel())
        offsets, values = np.empty(count, np.int64), np.empty(count, theta.numpy().dtype)
        union_loops.gather.on(count)(words, theta.numpy(), offsets, values)
        return torch.from_numpy(offsets), torch.from_numpy(values)
    united = union(known, theta.numel())
    assert united is not None
    if theta.is_cpu:  # for few of them torch's three calls cost several times as much
        place = united.numpy().astype(np.int64)
        return torch.from_numpy(place), torch.from_numpy(theta.numpy()[place])
    on_device = united.to(theta.device).long()
    return on_device, theta[on_device]


def most_changed(changes: Sequence[ChangedIndices] | None, size: int) -> int | None:
    """Bound the entries of a union; ``None`` for every element."""
    known = [changed.numel() for changed in changes or () if changed is not None]
    return None if changes is None or len(known) < len(changes) else min(size, sum(known))


def _known(changes: Sequence[ChangedIndices]) -> list[torch.Tensor] | None:
    """Return the changes that name indices; ``None`` if one is of every element."""
    if any(changed is None for changed in changes):
        return None
    return [changed for changed in changes if changed is not None and changed.numel()]


def _is_scanned(known: list[torch.Tensor], size: int) -> bool:
    """Tell whether a bitmap is scanned for the union, and not the offsets sorted."""
    entries = sum(each.numel() for each in known)
    return known[-1].is_cpu and entries >= _SCAN_FROM * size


def _bitmap(known: list[torch.Tensor], size: int) -> tuple[NDArray[np.uint64], int]:
    """Mark the offsets in a bitmap of ``size`` bits; return its words, and how many bits are set."""
    words = np.zeros(-(-size // 64), np.uint64)
    for each in known:
        union_loops.mark.on(each.numel())(words, each.numpy())
    return words, int(np.bitwise_count(words).sum(dtype=np.int64))


def _sorted_union(known: list[torch.Tensor]) -> torch.Tensor:
    joined = torch.cat([each.to(known[-1].device) for each in known])  # those before a restart are on the host
    if joined.device.type != "cpu":
        distinct: torch.Tensor = torch.unique(joined)
        return distinct
    offsets = joined.numpy()
    offsets.sort()  # numpy.unique hashes, which takes a hundred times as long on 10^6 offsets
    first = np.empty(offsets.size, dtype=np.bool_)
    first[:1] = True
    np.not_equal(offsets[1:], offsets[:-1], out=first[1:])
    return torch.from_numpy(offsets[first])

"""Which indices each recent version changed.

An exact reply costs what changed, never n, and needs no memory per worker: the union of the changes since any worker's
version is enough, because a reply sends values, not differences.
"""

import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from pscore.model.sparse_slice import SparseSlice

ChangedIndices = torch.Tensor | None
"""Offsets within the shard (int32 or int64, strictly increasing), or ``None`` for every element."""

_MOST_VERSIONS = 100_000  # a bound on what empty pushes may cost; real ones reach the entry limit long before
ALMOST_ALL = 0.8
"""Share of n from which on a change counts as one of everything: values alone are fewer bytes than with offsets."""
_SCAN_FROM = 1 / 6  # share of n from which marking and scanning n bytes beats sorting the entries (measured)


def changed_by(push: SparseSlice | None) -> ChangedIndices:
    """Return the indices that a push over a shard's whole span names."""
    if push is None:
        return torch.empty(0, dtype=torch.int32)
    return None if push.offsets is None else push.offsets.to(offset_dtype(push.span.length))


def offset_dtype(length: int) -> torch.dtype:
    """Return the dtype of offsets within a shard of so many elements."""
    return torch.int32 if length < 2**31 else torch.int64


class ChangeLog:
    """The changes of recent versions, at most ``entry_limit`` offsets, oldest dropped first. Thread-safe.

    Every change after version ``covered_from`` is recorded.
    """

    def __init__(self, size: int, entry_limit: int, version: int = 0) -> None:
        self._size, self._entry_limit = size, entry_limit
        self._changes: deque[tuple[int, ChangedIndices]] = deque()
        self._entries = 0
        self.covered_from = version
        self._lock = threading.Lock()

    def append(self, version: int, changed: ChangedIndices) -> None:
        """Record what ``version`` changed; versions come in order."""
        if changed is not None and changed.numel() >= ALMOST_ALL * self._size:
            changed = None
        with self._lock:
            self._changes.append((version, changed))
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

    def reach_back(self, changes: list[tuple[int, ChangedIndices]]) -> None:
        """Prepend the changes of older versions, in order, up to where this log begins; within the limit."""
        with self._lock:
            for version, changed in reversed(changes):
                size = 0 if changed is None else changed.numel()
                room = self._entries + size <= self._entry_limit and len(self._changes) < _MOST_VERSIONS
                if version != self.covered_from or not room:
                    return
                self._changes.appendleft((version, changed))
                self._entries += size
                self.covered_from = version - 1

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
            return [self._changes[position][1] for position in range(-count, 0)]


def union(changes: Sequence[ChangedIndices], size: int) -> ChangedIndices:
    """Return the sorted union of changes within a shard of ``size`` elements."""
    if any(changed is None for changed in changes):
        return None
    known = [changed for changed in changes if changed is not None and changed.numel()]
    if not known:
        return torch.empty(0, dtype=torch.int64)
    if len(known) == 1:
        return known[0]
    joined = torch.cat([each.to(known[-1].device) for each in known])  # those of before a restart are on the host
    if joined.device.type != "cpu":
        distinct: torch.Tensor = torch.unique(joined)
        return distinct
    offsets = joined.numpy()
    if offsets.size >= _SCAN_FROM * size:
        mark = np.zeros(size, dtype=np.bool_)
        mark[offsets] = True
        return torch.from_numpy(np.flatnonzero(mark).astype(offsets.dtype))
    offsets.sort()  # numpy.unique hashes, which takes a hundred times as long on 10^6 offsets
    first = np.empty(offsets.size, dtype=np.bool_)
    first[:1] = True
    np.not_equal(offsets[1:], offsets[:-1], out=first[1:])
    return torch.from_numpy(offsets[first])

"""The update ledger: which indices each recent version changed.

It makes exact diffs cheap (a pull costs what changed, never n) and free of memory per worker: the union of the supports
since any worker's version is all that is needed, because a reply sends values, not differences.
"""

import threading
from collections import deque

import numpy as np
import torch

ChangedIndices = torch.Tensor | None
"""Offsets within the shard (int32 or int64, strictly increasing), or ``None`` for every element."""

_MOST_VERSIONS = 100_000  # a bound on what empty pushes may cost; real ones reach the entry limit long before
_ALMOST_ALL = 0.8  # from here on a dense reply is smaller than offsets and values
_SCAN_FROM = 1 / 6  # share of n from which marking and scanning n bytes beats sorting the entries (measured)


class UpdateLedger:
    """Supports of recent versions, oldest forgotten first. Thread-safe."""

    def __init__(self, size: int, entry_limit: int, version: int = 0) -> None:
        """Cover a shard of ``size`` elements from ``version`` on, remembering at most ``entry_limit`` offsets."""
        self._size = size
        self._entry_limit = entry_limit
        self._supports: deque[tuple[int, ChangedIndices]] = deque()
        self._entries = 0
        self._covered_from = version
        self._dropped_to = version
        self._lock = threading.Lock()

    def append(self, version: int, support: ChangedIndices) -> None:
        """Record what ``version`` changed; versions come in order."""
        if support is not None and support.numel() >= _ALMOST_ALL * self._size:
            support = None
        with self._lock:
            self._supports.append((version, support))
            self._entries += 0 if support is None else support.numel()
            while self._entries > self._entry_limit or len(self._supports) > _MOST_VERSIONS:
                dropped, old = self._supports.popleft()
                self._entries -= 0 if old is None else old.numel()
                self._covered_from = self._dropped_to = dropped

    @property
    def covered_from(self) -> int:
        """The version from which on everything is remembered."""
        with self._lock:
            return self._covered_from

    @property
    def room(self) -> int:
        """Entries that may still be added without forgetting others."""
        with self._lock:
            return self._entry_limit - self._entries

    def all(self) -> list[tuple[int, ChangedIndices]]:
        """Return everything that is remembered: versions, in order, and what they changed."""
        with self._lock:
            return list(self._supports)

    def reach_back(self, supports: list[tuple[int, ChangedIndices]]) -> None:
        """Add what older versions changed, in order, up to the one from which this ledger counts; within the limit."""
        with self._lock:
            for version, support in reversed(supports):
                size = 0 if support is None else support.numel()
                room = self._entries + size <= self._entry_limit and len(self._supports) < _MOST_VERSIONS
                if version != self._covered_from or not room:
                    return
                self._supports.appendleft((version, support))
                self._entries += size
                self._covered_from = version - 1

    def since(self, version: int) -> list[ChangedIndices] | None:
        """Return the supports of every version after ``version``; ``None`` if some of them are forgotten."""
        with self._lock:
            if version < self._covered_from:
                return None
            count = 0
            for recorded, _ in reversed(self._supports):
                if recorded <= version:
                    break
                count += 1
            return [self._supports[position][1] for position in range(-count, 0)]

    def has_dropped(self, version: int) -> bool:
        """Tell whether what came after a version is forgotten because it was so much."""
        with self._lock:
            return version < self._dropped_to


def union(supports: list[ChangedIndices], size: int) -> ChangedIndices:
    """Return the sorted union of supports within a shard of ``size`` elements."""
    if any(support is None for support in supports):
        return None
    known = [support for support in supports if support is not None and support.numel()]
    if not known:
        return torch.empty(0, dtype=torch.int64)
    if len(known) == 1:
        return known[0]
    joined = torch.cat(known)
    if joined.device.type != "cpu":
        distinct: torch.Tensor = torch.unique(joined)
        return distinct
    return torch.from_numpy(_distinct(joined.numpy(), size))


def _distinct(offsets: np.ndarray, size: int) -> np.ndarray:
    """Sort and drop repeats; ``numpy.unique`` hashes, which takes a hundred times as long on a million offsets."""
    if offsets.size >= _SCAN_FROM * size:
        mark = np.zeros(size, dtype=np.bool_)
        mark[offsets] = True
        return np.flatnonzero(mark).astype(offsets.dtype)
    offsets.sort()  # the concatenation is ours
    first = np.empty(offsets.size, dtype=np.bool_)
    first[0] = True
    np.not_equal(offsets[1:], offsets[:-1], out=first[1:])
    return offsets[first]

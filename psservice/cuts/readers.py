"""Who follows the model, and how far behind: for the status and the metrics, and for nothing else."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

_MOST_READERS = 4096
_GONE_SECONDS = 60.0  # without a question; a waiting reader asks again sooner


class Reader(NamedTuple):
    """A reader.

    Attributes:
        version: of shard 0, that it has whole.
        heard: when it asked last; ``behind_since``: since when it has lacked a newer cut, or ``None``.
    """

    name: str
    version: int
    heard: float
    behind_since: float | None

    def behind_seconds(self, now: float) -> float:
        """Return for how long it has lacked a newer cut; 0 if it has the newest."""
        return 0.0 if self.behind_since is None else max(0.0, now - self.behind_since)


class Readers:
    """The readers that have asked lately, at most 4,096; thread-safe. ``clock`` counts seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._readers: OrderedDict[str, Reader] = OrderedDict()  # who asked last is last
        self._lock = threading.Lock()

    def ask(self, name: str, version: int, *, is_behind: bool) -> None:
        """Note a reader's question."""
        now = self._clock()
        with self._lock:
            before = self._readers.pop(name, None)
            since = before.behind_since if before is not None else None
            self._readers[name] = Reader(name, version, now, (since or now) if is_behind else None)
            if len(self._readers) > _MOST_READERS:
                self._readers.popitem(last=False)

    def leave(self, name: str) -> None:
        """Forget a reader."""
        with self._lock:
            self._readers.pop(name, None)

    def __len__(self) -> int:
        """Count the readers."""
        with self._lock:
            self._forget()
            return len(self._readers)

    def _forget(self) -> None:
        """Drop readers that are gone; under the lock."""
        now = self._clock()
        while self._readers and next(iter(self._readers.values())).heard < now - _GONE_SECONDS:
            self._readers.popitem(last=False)

    def all(self) -> list[Reader]:
        """Return the readers, those first that have been behind for the longest time."""
        with self._lock:
            self._forget()
            found = [*self._readers.values()]
        return sorted(found, key=lambda each: (each.behind_since is None, each.behind_since or 0.0, each.name))

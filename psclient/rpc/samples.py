"""What has become of the samples that a worker leases: drawn by its loader, trained in a step, acknowledged.

A loader draws ahead of the training, in order. A step that comes from ``n`` samples has trained the first ``n`` that
were drawn and not trained; its push carries them, and those of earlier pushes that were not acknowledged, to shard 0,
which has them finished as soon as it has applied the push.
"""

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pscore.model.ranges import Ranges
from pscore.wire.messages import share_to_messages
from pscore.wire.v1 import parameter_server_pb2 as pb

_MOST_RANGES = 4096  # of one message

SampleSet = dict[int, Ranges]
"""Places by epoch."""


@dataclass(slots=True)
class IndexRange:
    """Neighbouring places of an epoch's order, ``[start, end)``."""

    epoch: int
    start: int
    end: int


class SampleTracker:
    """The samples that one worker leases, over all its datasets. Thread-safe.

    Places are drawn one by one in the main thread, and trained in the thread that opens a push, which with overlap is
    another one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._drawn: deque[tuple[str, IndexRange]] = deque()
        self._trained: dict[tuple[str, int], Ranges] = {}  # by dataset and epoch
        self._pushed: dict[tuple[str, int], Ranges] = {}

    @property
    def is_settled(self) -> bool:
        """Whether everything that was trained is acknowledged."""
        with self._lock:
            return not self._trained

    def draw(self, dataset: str, epoch: int, place: int) -> None:
        """Note that a place goes to the loader."""
        with self._lock:
            if self._drawn:
                name, last = self._drawn[-1]
                if (name, last.epoch, last.end) == (dataset, epoch, place):
                    last.end += 1
                    return
            self._drawn.append((dataset, IndexRange(epoch, place, place + 1)))

    def undraw(self, dataset: str, keep: int) -> list[IndexRange]:
        """Return what was drawn and not trained, in order, as undrawn; of the first ``keep`` a step is to come."""
        with self._lock:
            drawn, self._drawn = self._drawn, deque()
            back = []
            for name, part in drawn:
                middle = min(part.end, part.start + keep) if name == dataset else part.end
                if part.start < middle:
                    self._drawn.append((name, IndexRange(part.epoch, part.start, middle)))
                if middle < part.end:
                    back.append(IndexRange(part.epoch, middle, part.end))
                keep -= middle - part.start if name == dataset else 0
            return back

    def unacked(self, dataset: str) -> SampleSet:
        """Return what was drawn, and not acknowledged."""
        with self._lock:
            drawn = sample_set(part for name, part in self._drawn if name == dataset)
            trained = {epoch: ranges for (name, epoch), ranges in self._trained.items() if name == dataset}
            return union(drawn, trained)

    def open_push(self, samples: int) -> list[pb.FinishedSamples]:
        """Note that so many more samples are trained, and return those that the push finishes: one message's worth."""
        with self._lock:
            trained: dict[tuple[str, int], list[tuple[int, int]]] = {}
            while samples > 0 and self._drawn:
                name, part = self._drawn[0]
                end = min(part.end, part.start + samples)
                trained.setdefault((name, part.epoch), []).append((part.start, end))
                samples -= end - part.start
                part.start = end
                if part.start == part.end:
                    self._drawn.popleft()
            for key, pairs in trained.items():
                self._trained[key] = self._trained.get(key, Ranges()) | Ranges(pairs)
            finished: dict[str, SampleSet] = {}
            room, self._pushed = _MOST_RANGES, {}
            for (name, epoch), ranges in self._trained.items():
                found = self._pushed[name, epoch] = Ranges(ranges.pairs[:room])
                room -= len(found)
                finished.setdefault(name, {})[epoch] = found
            return [pb.FinishedSamples(dataset=name, ranges=share_to_messages(each)) for name, each in finished.items()]

    def acknowledged(self) -> None:
        """Note that shard 0 has applied the last push."""
        with self._lock:
            left = {key: ranges - self._pushed.get(key, Ranges()) for key, ranges in self._trained.items()}
            self._trained = {key: ranges for key, ranges in left.items() if ranges}
            self._pushed = {}


def index_ranges(messages: Iterable[pb.SampleRange]) -> list[IndexRange]:
    """Read messages."""
    return [IndexRange(each.epoch, each.start, each.start + each.count) for each in messages]


def sample_set(parts: Iterable[IndexRange]) -> SampleSet:
    """Return ranges as a set."""
    pairs: dict[int, list[tuple[int, int]]] = {}
    for part in parts:
        pairs.setdefault(part.epoch, []).append((part.start, part.end))
    return {epoch: Ranges(found) for epoch, found in pairs.items()}


def union(left: Mapping[int, Ranges], right: Mapping[int, Ranges]) -> SampleSet:
    """Return what is in either set."""
    return {n: left.get(n, Ranges()) | right.get(n, Ranges()) for n in sorted({*left, *right})}

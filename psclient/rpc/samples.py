"""The samples that a worker leases: drawn by its loader, trained in a step, acknowledged.

A loader draws ahead of the training, in order: a step of ``n`` samples has trained the first ``n`` that were drawn and
not trained. Its push reports them to shard 0 as finished, with those of earlier pushes that were not acknowledged.
"""

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Protocol

from pscore.model.ranges import Ranges
from pscore.wire.messages import share_to_messages
from pscore.wire.v1 import parameter_server_pb2 as pb

_MOST_RANGES = 4096  # of one message

SampleSet = dict[int, Ranges]
"""Places of a dataset's order, by epoch; a ``pb.SampleRange`` is neighbouring places of one epoch."""


class _Batches(Protocol):
    """The batches that a loader has given out; see :class:`psclient.data.given_batches.GivenBatches`."""

    @property
    def are_known(self) -> bool: ...

    def look(self) -> None: ...

    def take(self, samples: int) -> None: ...

    def check(self, samples: int) -> None: ...


class SampleTracker:
    """The samples that one worker leases, over all its datasets; drawn in one thread and pushed in another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._drawn: deque[tuple[str, pb.SampleRange]] = deque()
        self._trained: dict[tuple[str, int], Ranges] = {}  # by dataset and epoch
        self._pushed: dict[tuple[str, int], Ranges] = {}
        self._given: _Batches | None = None  # in the last pass that has begun

    def begin_pass(self, given: _Batches) -> None:
        """Compare the samples of steps with the batches of a loader from now on."""
        self._given = given

    def look(self) -> None:
        """Note which batches a loader has given out by now: after its last one there may be no loader to ask."""
        if self._given is not None:
            self._given.look()

    def check(self, samples: int) -> None:
        """Raise :class:`ConfigurationError` if a step of so many samples cannot be one of the loader's batches."""
        given = self._given
        if given is None or not given.are_known:
            return
        with self._lock:
            has_drawn = bool(self._drawn)
        if has_drawn:  # else the step is of other data
            given.check(samples)

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
                if (name, last.epoch, last.start + last.count) == (dataset, epoch, place):
                    last.count += 1
                    return
            self._drawn.append((dataset, pb.SampleRange(epoch=epoch, start=place, count=1)))

    def undraw(self, dataset: str, keep: int) -> list[pb.SampleRange]:
        """Return the samples that were drawn and not trained, in order; the first ``keep`` of them stay drawn."""
        with self._lock:
            drawn, self._drawn = self._drawn, deque()
            back = []
            for name, part in drawn:
                kept = min(keep, part.count) if name == dataset else part.count
                if kept:
                    self._drawn.append((name, pb.SampleRange(epoch=part.epoch, start=part.start, count=kept)))
                if kept < part.count:
                    back.append(pb.SampleRange(epoch=part.epoch, start=part.start + kept, count=part.count - kept))
                keep -= kept if name == dataset else 0
            return back

    def unacked(self, dataset: str) -> SampleSet:
        """Return the samples that were drawn and not acknowledged."""
        with self._lock:
            drawn = sample_set(part for name, part in self._drawn if name == dataset)
            trained = {epoch: ranges for (name, epoch), ranges in self._trained.items() if name == dataset}
            return union(drawn, trained)

    def open_push(self, samples: int) -> list[pb.FinishedSamples]:
        """Note that so many more samples are trained, and return those that the push finishes: one message's worth."""
        if self._given is not None:
            self._given.take(samples)
        with self._lock:
            trained: dict[tuple[str, int], list[tuple[int, int]]] = {}
            while samples > 0 and self._drawn:
                name, part = self._drawn[0]
                count = min(part.count, samples)
                trained.setdefault((name, part.epoch), []).append((part.start, part.start + count))
                samples -= count
                part.start += count
                part.count -= count
                if not part.count:
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


def sample_set(parts: Iterable[pb.SampleRange]) -> SampleSet:
    """Return ranges as a set."""
    pairs: dict[int, list[tuple[int, int]]] = {}
    for part in parts:
        pairs.setdefault(part.epoch, []).append((part.start, part.start + part.count))
    return {epoch: Ranges(found) for epoch, found in pairs.items()}


def union(left: Mapping[int, Ranges], right: Mapping[int, Ranges]) -> SampleSet:
    """Return the samples of both sets."""
    return {n: left.get(n, Ranges()) | right.get(n, Ranges()) for n in sorted({*left, *right})}

"""How far a worker is with the samples it holds: drawn by its loader, trained in a step, acknowledged by the server.

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

Share = dict[int, Ranges]
"""Places by epoch."""


@dataclass(slots=True)
class Piece:
    """Neighbouring places of an epoch's order, ``[start, end)``."""

    epoch: int
    start: int
    end: int


class Progress:
    """The samples in one worker's hands, over all its datasets. Thread-safe.

    Places are drawn one by one in the main thread, and trained in the thread that opens a push, which with overlap is
    another one.
    """

    def __init__(self) -> None:
        """Begin with empty hands."""
        self._lock = threading.Lock()
        self._drawn: deque[tuple[str, Piece]] = deque()
        self._trained: dict[str, Share] = {}
        self._pushed: dict[str, Share] = {}

    @property
    def is_settled(self) -> bool:
        """Whether everything that was trained is acknowledged."""
        with self._lock:
            return not any(self._trained.values())

    def draw(self, dataset: str, epoch: int, place: int) -> None:
        """Note that a place goes to the loader."""
        with self._lock:
            if self._drawn:
                name, last = self._drawn[-1]
                if (name, last.epoch, last.end) == (dataset, epoch, place):
                    last.end += 1
                    return
            self._drawn.append((dataset, Piece(epoch, place, place + 1)))

    def put_back(self, dataset: str, keep: int) -> list[Piece]:
        """Take back what was drawn and not trained, in order; of the first ``keep`` the step is still to come."""
        with self._lock:
            drawn, self._drawn = self._drawn, deque()
            back = []
            for name, piece in drawn:
                middle = min(piece.end, piece.start + keep) if name == dataset else piece.end
                if piece.start < middle:
                    self._drawn.append((name, Piece(piece.epoch, piece.start, middle)))
                if middle < piece.end:
                    back.append(Piece(piece.epoch, middle, piece.end))
                keep -= middle - piece.start if name == dataset else 0
            return back

    def held(self, dataset: str) -> Share:
        """Return what was drawn, and not acknowledged."""
        with self._lock:
            drawn = share_of(piece for name, piece in self._drawn if name == dataset)
            return joined(drawn, self._trained.get(dataset, {}))

    def open_push(self, samples: int) -> list[pb.FinishedSamples]:
        """Note that so many more samples are trained, and return all those that the push finishes."""
        with self._lock:
            trained: dict[str, list[Piece]] = {}
            while samples > 0 and self._drawn:
                name, piece = self._drawn[0]
                end = min(piece.end, piece.start + samples)
                trained.setdefault(name, []).append(Piece(piece.epoch, piece.start, end))
                samples -= end - piece.start
                piece.start = end
                if piece.start == piece.end:
                    self._drawn.popleft()
            for name, pieces in trained.items():
                self._trained[name] = joined(self._trained.get(name, {}), share_of(pieces))
            self._pushed = _limited(self._trained)
            return [
                pb.FinishedSamples(dataset=name, ranges=share_to_messages(share))
                for name, share in self._pushed.items()
            ]

    def acknowledged(self) -> None:
        """Note that shard 0 has applied the last push."""
        with self._lock:
            for name, share in self._pushed.items():
                self._trained[name] = less(self._trained.get(name, {}), share)
            self._pushed = {}


def share_of(pieces: Iterable[Piece]) -> Share:
    """Return pieces as a share."""
    pairs: dict[int, list[tuple[int, int]]] = {}
    for piece in pieces:
        pairs.setdefault(piece.epoch, []).append((piece.start, piece.end))
    return {epoch: Ranges(found) for epoch, found in pairs.items()}


def joined(left: Mapping[int, Ranges], right: Mapping[int, Ranges]) -> Share:
    """Return what is in either share."""
    return {n: left.get(n, Ranges()) | right.get(n, Ranges()) for n in sorted({*left, *right})}


def less(left: Mapping[int, Ranges], right: Mapping[int, Ranges]) -> Share:
    """Return what is in the first share and not in the second."""
    return {n: rest for n, ranges in left.items() if (rest := ranges - right.get(n, Ranges()))}


def _limited(shares: Mapping[str, Share]) -> dict[str, Share]:
    """Return as much as one message may hold; the rest goes with the next push."""
    room, found = _MOST_RANGES, {}
    for name, share in shares.items():
        cut = {}
        for epoch, ranges in share.items():
            cut[epoch] = Ranges(ranges.pairs[:room])
            room -= len(cut[epoch])
        if cut:
            found[name] = cut
    return found

"""How the shards of a run fare, for people to see: measured here, and on shard 0 heard from the others too."""

import threading
from collections.abc import Callable
from typing import NamedTuple

from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.observability.history import History

LONGEST_AGE_SECONDS = 15.0
"""After which the rates of a shard that tells nothing count no more among those of all shards."""


class _Heard(NamedTuple):
    progress: pb.ShardProgress
    seconds: float  # when, by the monotonic clock


class Progress:
    """The progress of the shards that this one knows of, and the past. In memory only; thread-safe.

    Attributes:
        history: points of the past, over all shards on shard 0.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.history = History()
        self._clock, self._lock = clock, threading.Lock()
        self._known: dict[int, _Heard] = {}
        self._own: pb.ShardProgress | None = None
        self._losses, self._loss_count = 0.0, 0

    @property
    def own(self) -> pb.ShardProgress | None:
        """This shard's newest progress; ``None`` in the first seconds."""
        return self._own

    def measured(self, progress: pb.ShardProgress) -> None:
        """Note this shard's progress."""
        self._own = progress
        self.hear(progress)

    def hear(self, progress: pb.ShardProgress) -> None:
        """Note the progress of a shard; its index has been checked."""
        with self._lock:
            self._known[progress.shard_index] = _Heard(progress, self._clock())

    def known(self) -> list[pb.ShardProgress]:
        """Return copies of the newest progress of each shard that is known, by index, each with its age."""
        with self._lock:
            known, now = sorted(self._known.items()), self._clock()
        found = []
        for _, heard in known:
            progress = pb.ShardProgress()
            progress.CopyFrom(heard.progress)
            progress.age_seconds = 0.0 if heard.progress is self._own else max(0.0, now - heard.seconds)
            found.append(progress)
        return found

    def note_loss(self, loss: float) -> None:
        """Note a loss that a worker has told, which is finite."""
        with self._lock:
            self._losses += loss
            self._loss_count += 1

    def take_loss(self) -> float | None:
        """Return the mean of the losses noted since the last call; ``None`` if there are none."""
        with self._lock:
            total, count = self._losses, self._loss_count
            self._losses, self._loss_count = 0.0, 0
        return total / count if count else None

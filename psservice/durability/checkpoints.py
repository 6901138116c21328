"""Which checkpoints the shards of a run share: shard 0 draws an id, and the others take part once they hear of it.

An id is ``e<epoch>-v<version>-<history>-<number>``. The number is that of the journal's segment that shard 0 began
with it, which rises for as long as its data directory lives, so (epoch, number) is an order of checkpoints that no
restart forgets. A shard takes part in the next one only, and in none twice. It takes no part in the one that it hears
of first after a start, or while it has no model of that epoch: it would add parameters of another moment.
"""

import re
import threading

from pscore.wire.generation import epoch, nonce

_ID = re.compile(r"e(\d{1,10})-v(\d{1,20})-([0-9a-f]{8})-(\d{1,18})", re.ASCII)

NEW = "new"
"""What commands call a checkpoint that is taken now; no checkpoint is named so."""

Place = tuple[int, int]
"""Epoch and number: a checkpoint's position in the order of all."""


def new_id(generation: int, number: int, version: int) -> str:
    """Return the id of a checkpoint that shard 0 draws; with the history, since going back repeats versions."""
    return f"e{epoch(generation)}-v{version}-{nonce(generation):08x}-{number}"


def place_of(checkpoint: str) -> Place | None:
    """Return a checkpoint's position in the order; ``None`` for a name that an operator has made up."""
    found = _ID.fullmatch(checkpoint)
    return None if found is None else (int(found[1]), int(found[4]))


class Checkpoints:
    """What one shard knows of checkpoints. Thread-safe.

    Attributes:
        last: the newest that this shard has taken part in, or will take no part in.
        wanted: a newer one that shard 0 has announced; else empty.
    """

    def __init__(self) -> None:
        self.last: Place = (0, 0)
        self.wanted = ""
        self._has_heard = False  # of any checkpoint, or that there is none, since the start
        self._lock = threading.Lock()

    def hear(self, generation: int | None, checkpoint: str) -> bool:
        """Note shard 0's newest checkpoint; return True if a model of ``generation`` takes part in it."""
        place = place_of(checkpoint)
        with self._lock:
            is_first, self._has_heard = not self._has_heard, True
            if place is None:
                return False
            if is_first or generation is None or place[0] != epoch(generation):
                self.last = max(self.last, place)
            if place <= max(self.last, place_of(self.wanted) or self.last):
                return False
            self.wanted = checkpoint
        return True

    def up_to(self, checkpoint: str) -> Place:
        """Return the newest of this checkpoint and those that this shard has taken part in."""
        with self._lock:
            return max(self.last, place_of(checkpoint) or self.last)

    def taken(self, checkpoint: str) -> None:
        """Note that this shard takes part in a checkpoint."""
        with self._lock:
            self.last = max(self.last, place_of(checkpoint) or self.last)
            if (place_of(self.wanted) or self.last) <= self.last:
                self.wanted = ""

"""Which checkpoints the shards of a run share: shard 0 draws an id, workers carry it, and the others take part once.

An id is ``e<epoch>-v<version>-<history>-<number>``. The number is that of the journal's segment that shard 0 began
with it, which rises for as long as its data directory lives, so (epoch, number) is an order of checkpoints that no
restart forgets. A shard takes part in the next one only, and in none twice. If it started empty, or went back
alone, it takes no part in one that was announced before: it would add parameters of another moment.

Where tokens are asked for, what workers carry is ``ID.PROOF``: an HMAC under a key that shards have and workers have
not, the hash of an admin's token. So a worker can pass an id on, and can make none.
"""

import hashlib
import hmac
import re
import threading
from collections.abc import Callable, Sequence

from pscore.wire.generation import epoch, nonce
from pscore.wire.v1 import parameter_server_pb2 as pb

_ID = re.compile(r"e(\d{1,10})-v(\d{1,20})-([0-9a-f]{8})-(\d{1,18})", re.ASCII)

Place = tuple[int, int]
"""Epoch and number: a checkpoint's position in the order of all."""


def new_id(generation: int, number: int, version: int) -> str:
    """Return the id of a checkpoint that shard 0 draws; with the history, since going back repeats versions."""
    return f"e{epoch(generation)}-v{version}-{nonce(generation):08x}-{number}"


def place_of(checkpoint: str) -> Place | None:
    """Return a checkpoint's position in the order; ``None`` for a name that an operator has made up."""
    found = _ID.fullmatch(checkpoint)
    return None if found is None else (int(found[1]), int(found[4]))


def _was_taken_before(checkpoint: str, seen: pb.ShardHistory) -> bool:
    """Return whether shard 0 had taken a checkpoint when a worker pulled this version from it."""
    found = _ID.fullmatch(checkpoint)
    return found is not None and (int(found[3], 16) != nonce(seen.generation) or int(found[2]) <= seen.version)


class Checkpoints:
    """What one shard knows of checkpoints. Thread-safe.

    Attributes:
        keys: returns the keys that prove an id, the signing key first. ``None``: ids need no proof. Empty: no id can
            be proved, so no id is followed.
        last: the newest that this shard has taken part in, or that was announced before it went back.
        wanted: a newer one that a worker has brought; else empty.
    """

    def __init__(self) -> None:
        self.keys: Callable[[], Sequence[bytes] | None] = lambda: None
        self.last: Place = (0, 0)
        self.wanted = ""
        self._seen_first: pb.ShardHistory | None = None  # of shard 0, by a worker, since the start
        self._has_heard = False  # of any checkpoint, since the start
        self._lock = threading.Lock()

    def told(self, run_id: str, checkpoint: str) -> str:
        """Return what workers carry to the other shards; empty where there is nothing to carry."""
        if place_of(checkpoint) is None:
            return ""
        keys = self.keys()
        if keys is None:
            return checkpoint
        return f"{checkpoint}.{_proof(keys[0], run_id, checkpoint)}" if keys else ""

    def hear_of_shard_0(self, seen: pb.ShardHistory) -> None:
        """Note what a worker has pulled of shard 0: what shard 0 took up to there was announced without this shard."""
        with self._lock:
            self._seen_first = self._seen_first or seen

    def hear(self, run_id: str, generation: int, told: str) -> bool:
        """Note what a worker carries; return True where that is a checkpoint to take part in."""
        checkpoint, _, proof = told.partition(".")
        place, keys = place_of(checkpoint), self.keys()
        if place is None or place[0] != epoch(generation):
            return False
        if keys is not None and not any(
            hmac.compare_digest(_proof(key, run_id, checkpoint), proof if proof.isascii() else "") for key in keys
        ):
            return False
        with self._lock:
            is_first, self._has_heard = not self._has_heard, True
            seen = self._seen_first
            # A shard that was filled or taken back alone is in another history than shard 0.
            if is_first and seen and seen.generation != generation and _was_taken_before(checkpoint, seen):
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


def _proof(key: bytes, run_id: str, checkpoint: str) -> str:
    message = f"{len(run_id)}:{run_id}{checkpoint}".encode()
    return hmac.new(key, b"sparseps checkpoint\0" + message, hashlib.sha256).hexdigest()[:32]

"""What a shard knows of its own history of versions and of those of the other shards of its run.

Workers tell with the renewals of their leases what they have pulled of each shard. A shard writes that down, so that it
still knows after a restart, and notices that another shard has lost some of it.
"""

import threading
from collections.abc import Iterable

from pscore.wire.histories import MOST_ORIGINS, lost_versions
from pscore.wire.v1 import parameter_server_pb2 as pb


class Histories:
    """The origins of a shard's history, and the histories of the other shards. Thread-safe.

    Args:
        origins: histories that the shard's own goes on from, oldest first.
        known: what is known of the other shards, with the versions that they have lost.
    """

    def __init__(self, origins: Iterable[pb.ShardOrigin] = (), known: Iterable[pb.ShardHistory] = ()) -> None:
        self.origins = (*origins,)
        self._known: dict[int, pb.ShardHistory] = {}
        self._unwritten: set[int] = set()
        self._lost: dict[int, int] = {}
        self._lock = threading.Lock()
        for each in known:
            self.replay(each)

    def branch(self, generation: int, version: int, checkpoint: str) -> None:
        """Note that the shard leaves a history at this version; before anything is served."""
        origin = pb.ShardOrigin(generation=generation, version=version, checkpoint=checkpoint)
        self.origins = (*self.origins, origin)[-MOST_ORIGINS:]

    def hear_of_itself(self, told: pb.ShardHistory, generation: int, version: int) -> int:
        """Compare the shard with what somebody has pulled of it in this history; return the versions that it lacks.

        It lacks some if its disk was taken back and the start could not notice, as from an image of the volume.
        """
        lost = max(0, told.version - version) if told.generation == generation else 0
        with self._lock:
            if not lost or told.shard_index in self._lost:
                return 0
            self._known[told.shard_index] = _without_losses(told)
            self._lost[told.shard_index] = lost
            self._unwritten.add(told.shard_index)
        return lost

    def hear(self, told: pb.ShardHistory) -> int:
        """Note what a worker has pulled of another shard; return how many known versions that shard has lost."""
        index = told.shard_index
        with self._lock:
            known = self._known.get(index)
            if known is not None and any(each.generation == told.generation for each in known.origins):
                return 0  # of a worker that has not joined again since
            lost = 0
            if known is not None and known.generation == told.generation:
                if told.version <= known.version:
                    return 0
            elif known is not None:
                lost = lost_versions(known, told, self.origins)
            self._known[index] = _without_losses(told)
            self._unwritten.add(index)
            if lost:
                self._lost[index] = lost
        return lost

    def replay(self, known: pb.ShardHistory) -> None:
        """Know again what the shard wrote down; before anything is served."""
        self._known[known.shard_index] = _without_losses(known)
        if known.lost_versions:
            self._lost[known.shard_index] = known.lost_versions

    def unwritten(self) -> list[pb.ShardHistory]:
        """Return what is known and was not returned before, with the versions that shards have lost."""
        with self._lock:
            new, self._unwritten = self._unwritten, set()
            return self._with_losses(new)

    def known(self) -> list[pb.ShardHistory]:
        """Return what is known of the other shards, with the versions that they have lost."""
        with self._lock:
            return self._with_losses(self._known)

    def lost(self) -> dict[str, float]:
        """Return the versions that other shards have lost, by the index of each shard that is known."""
        with self._lock:
            return {str(index): float(self._lost.get(index, 0)) for index in sorted(self._known)}

    def _with_losses(self, indices: Iterable[int]) -> list[pb.ShardHistory]:
        return [_with_losses(self._known[index], self._lost.get(index, 0)) for index in sorted(indices)]


def _without_losses(history: pb.ShardHistory) -> pb.ShardHistory:
    return _with_losses(history, 0)


def _with_losses(history: pb.ShardHistory, lost: int) -> pb.ShardHistory:
    copy = pb.ShardHistory()
    copy.CopyFrom(history)
    copy.lost_versions = lost
    return copy

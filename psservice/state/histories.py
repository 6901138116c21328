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

    A history that a worker tells is known at once, and becomes a part of the state with :meth:`apply`.

    Args:
        origins: histories that the shard's own goes on from, oldest first.
        known: what is known of the other shards, with the versions that they have lost.
    """

    def __init__(self, origins: Iterable[pb.ShardOrigin] = (), known: Iterable[pb.ShardHistory] = ()) -> None:
        self.origins = (*origins,)
        self._known = {each.shard_index: each for each in known}
        self._heard: dict[int, pb.ShardHistory] = {}
        self._lock = threading.Lock()

    def branch(self, generation: int, version: int, checkpoint: str) -> None:
        """Note that the shard leaves a history at this version; before anything is served."""
        origin = pb.ShardOrigin(generation=generation, version=version, checkpoint=checkpoint)
        self.origins = (*self.origins, origin)[-MOST_ORIGINS:]

    def hear_of_itself(self, told: pb.ShardHistory, generation: int, version: int) -> int:
        """Compare the shard with what somebody has pulled of it; return the versions that it lacks of this history.

        It lacks some if its disk was taken back and the start could not notice, as from an image of the volume.
        """
        lost = max(0, told.version - version) if told.generation == generation else 0
        with self._lock:
            known = self._newest(told.shard_index)
            if not lost or (known is not None and known.lost_versions):
                return 0
            self._heard[told.shard_index] = _with_losses(told, lost)
        return lost

    def hear_of_successor(self, told: pb.ShardHistory) -> None:
        """Note the history of a standby that has taken this shard's place, as that one tells, which is an admin."""
        with self._lock:
            if self._newest(told.shard_index) != told:
                self._heard[told.shard_index] = told

    def successor(self, index: int, generation: int) -> int:
        """Return the generation of a history that was told of shard ``index``, and has begun with ``generation``."""
        told = self._newest(index)
        if told is None or told.generation == generation:
            return 0
        return told.generation if any(origin.generation == generation for origin in told.origins) else 0

    def hear(self, told: pb.ShardHistory) -> int:
        """Note what a worker has pulled of another shard; return how many known versions that shard has lost."""
        index = told.shard_index
        with self._lock:
            known = self._newest(index)
            if known is not None and any(each.generation == told.generation for each in known.origins):
                return 0  # of a worker that has not joined again since
            lost = 0
            if known is not None and known.generation == told.generation:
                if told.version <= known.version:
                    return 0
            elif known is not None:
                lost = lost_versions(known, told, self.origins)
            before = known.lost_versions if known is not None else 0
            self._heard[index] = _with_losses(told, lost or before)
        return lost

    def heard(self) -> list[pb.ShardHistory]:
        """Return the histories that workers have told since the last :meth:`apply`."""
        with self._lock:
            return [self._heard[index] for index in sorted(self._heard)]

    def apply(self, histories: Iterable[pb.ShardHistory]) -> None:
        """Take written histories into the state; newer ones that workers told meanwhile stay unwritten."""
        with self._lock:
            for each in histories:
                self._known[each.shard_index] = each
                if self._heard.get(each.shard_index) == each:
                    del self._heard[each.shard_index]

    def known(self) -> list[pb.ShardHistory]:
        """Return what is known of the other shards, with the versions that they have lost."""
        with self._lock:
            newest = self._known | self._heard
        return [newest[index] for index in sorted(newest)]

    def lost(self) -> dict[str, float]:
        """Return the versions that other shards have lost, by the index of each shard that is known."""
        return {str(each.shard_index): float(each.lost_versions) for each in self.known()}

    def _newest(self, index: int) -> pb.ShardHistory | None:
        return self._heard.get(index) or self._known.get(index)


def _with_losses(history: pb.ShardHistory, lost: int) -> pb.ShardHistory:
    copy = pb.ShardHistory()
    copy.CopyFrom(history)
    copy.lost_versions = lost
    return copy

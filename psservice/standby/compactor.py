"""Snapshots of a standby's own: from an earlier one and the segments behind, as a recovery applies them.

A primary begins a segment with each snapshot. So the standby, which applies a segment once it is complete, has at its
end what that snapshot has, and needs no copy of it over the line.
"""

import logging
from contextlib import closing

from psservice.durability.capture import capture
from psservice.durability.replay import Past
from psservice.durability.storage_error import or_storage_error
from psservice.shard.shard import Shard
from psservice.storage.recovery_source import newest_source
from psservice.storage.replica import Replica
from psservice.storage.snapshots import Snapshot

log = logging.getLogger(__name__)


class Compactor:
    """Applies complete segments to a model in memory, and writes a snapshot behind each; for one thread.

    ``shard`` keeps nothing itself; its settings, clock and device are those of the standby.
    """

    def __init__(self, shard: Shard, replica: Replica) -> None:
        self._shard, self._replica = shard, replica
        self._past: Past | None = None
        self._begun_with: Snapshot | None = None
        self._segment = 0  # the next to apply

    def advance(self) -> bool:
        """Apply the next complete segment, and write a snapshot behind it; tell whether there was one.

        Raises :class:`~psservice.storage.files.StorageError`.
        """
        newest = self._replica.newest
        if newest is None:
            return False
        with or_storage_error(self._replica.path):
            if self._past is None or self._is_replaced(newest):
                self._begin()
            if self._past is None or self._segment >= self._replica.segment:
                return False
            for record in self._replica.reader(self._segment).records():
                self._past.apply(record)
            self._segment += 1
            place = self._past.snapshot.manifest.last_checkpoint
            with closing(capture(self._shard, self._past.state, self._segment, "", place)) as copied:
                kept = self._replica.keep(copied.manifest, copied.tensors)
        if kept is None:
            self._past = None
            return True
        self._begun_with = kept
        log.info("snapshot of the standby taken", extra={"version": kept.manifest.version, "path": str(kept.path)})
        return True

    def _is_replaced(self, newest: Snapshot) -> bool:
        """Tell whether the primary has sent another snapshot since: two may have the same segment and version."""
        begun = self._begun_with
        return begun is None or (newest.path, newest.manifest.generation) != (begun.path, begun.manifest.generation)

    def _begin(self) -> None:
        """Begin with the newest snapshot."""
        self._past = None
        source = newest_source(self._replica.path, self._replica.files)
        if source is None:
            return
        shard = self._shard
        self._past = Past(source, shard.device, shard.settings.shard, shard.environment.monotonic, shard.new_state())
        self._begun_with, self._segment = source.snapshot, source.snapshot.manifest.segment

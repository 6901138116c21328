"""Which worker uploads the model (docs/protocol.md, *Joining*)."""

import logging
import math
from dataclasses import dataclass

from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.generation import epoch, next_generation
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.cluster.leases import Leases
from psservice.types import Identity

log = logging.getLogger(__name__)

_MOST_EPOCH_SEEN = 1 << 31
"""Highest epoch of a generation that a joining worker may report; those that shard 0 assigns may exceed it."""

_LEAST_RISE = 1e-6
"""Of the share sent, that counts as progress: no grant is prolonged for ever by ever smaller rises."""


@dataclass(slots=True)
class _Grant:
    identity: Identity
    generation: int
    from_replica: bool
    began: float
    moved: float
    share: float = 0.0


class UploadGrant:
    """The coordinator's grant to the one worker that may upload; ends after ``idle_seconds`` without progress.

    Not thread-safe but for :meth:`note` and :meth:`progress`.
    """

    def __init__(self, leases: Leases, idle_seconds: float) -> None:
        self._leases, self._idle_seconds = leases, idle_seconds
        self._grant: _Grant | None = None

    def request(self, identity: Identity, generation_seen: int, has_replica: bool) -> int | None:
        """Return the generation that this worker is to upload, or ``None`` while another uploads (``BAD_REQUEST``)."""
        grant, now = self._grant, self._leases.clock()
        if grant is not None and grant.identity != identity and self._is_active(grant):
            replica_beats_fresh = has_replica and not grant.from_replica
            if not replica_beats_fresh:
                return None
        previous = 0 if grant is None else grant.generation
        if epoch(generation_seen) > max(_MOST_EPOCH_SEEN, epoch(previous)):
            raise Rejected(
                ErrorCode.BAD_REQUEST,
                f"generation_seen is of epoch {epoch(generation_seen)}; it must be 0 to {_MOST_EPOCH_SEEN}, or shard 0 "
                "must know it. Where a shard really has such a model, restart all shards together, empty",
            )
        # A shard with this very generation was filled by this worker; another generation of its epoch was not.
        is_outdone = generation_seen != previous and epoch(generation_seen) >= epoch(previous)
        if grant is None or grant.identity != identity or is_outdone:
            generation = next_generation(max(previous, generation_seen))
            self._grant = grant = _Grant(identity, generation, has_replica, now, now)
            log.info("upload granted", extra={"worker": identity.worker_id, "generation": grant.generation})
        return grant.generation

    def require(self, identity: Identity, generation: int) -> None:
        """Raise :class:`Rejected` (``STALE_GENERATION``) unless this worker may upload this generation."""
        grant = self._grant
        if grant is None or (grant.identity, grant.generation) != (identity, generation):
            raise Rejected(ErrorCode.STALE_GENERATION, "another worker holds the upload now")

    def note(self, identity: Identity, share: float) -> None:
        """Note how much of the whole model, 0 to 1, a worker has sent to all shards; only a new maximum counts."""
        grant = self._grant
        if grant is not None and grant.identity == identity and share > grant.share + _LEAST_RISE:
            grant.share, grant.moved = share, self._leases.clock()

    def progress(self) -> pb.ModelProgress | None:
        """Return the upload's progress; ``None`` where no worker uploads."""
        grant = self._grant
        if grant is None or not self._is_active(grant):
            return None
        left = (self._leases.clock() - grant.began) * (1 - grant.share) / grant.share if grant.share else 0.0
        return pb.ModelProgress(worker_id=grant.identity.worker_id, share=grant.share, seconds_left=left)

    def release(self, identity: Identity) -> None:
        """End the grant of a worker that has left; its generation stays known."""
        if self._grant is not None and self._grant.identity == identity:
            self._grant.moved = -math.inf

    def end(self) -> None:
        """Drop the grant: the model is installed."""
        self._grant = None

    def _is_active(self, grant: _Grant) -> bool:
        """Tell whether a worker uploads, or may resume sooner than another worker could send everything again."""
        patience = self._idle_seconds
        if not self._leases.is_live(grant.identity):
            patience = min(patience, self._leases.lease_seconds + grant.moved - grant.began)
        return self._leases.clock() - grant.moved < patience

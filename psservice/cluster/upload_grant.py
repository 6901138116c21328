"""Whose turn it is to upload the model (docs/protocol.md, *Joining*)."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.generation import epoch, next_generation
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.cluster.leases import Identity

log = logging.getLogger(__name__)

_MOST_EPOCH_SEEN = 1 << 31  # of a joining worker's generation; epochs that shard 0 hands out may grow beyond

_LEAST_RISE = 1e-6
"""Of the share sent, that is progress: a turn without an end is not to be had by saying a little more each time."""


@dataclass(slots=True)
class _Hold:
    identity: Identity
    generation: int
    from_replica: bool
    began: float
    moved: float
    share: float = 0.0


class UploadTurn:
    """The coordinator's memory of who is to upload, and how far that has come.

    Not thread-safe but for :meth:`note` and :meth:`progress`.

    Args:
        is_live: whether a worker holds a lease.
        clock: monotonic seconds.
        lease_seconds: life of a lease.
        idle_seconds: without progress, after which another worker has its turn, whatever lease there is.
    """

    def __init__(
        self,
        is_live: Callable[[Identity], bool],
        clock: Callable[[], float],
        lease_seconds: float,
        idle_seconds: float,
    ) -> None:
        """Nobody is."""
        self._is_live, self._clock = is_live, clock
        self._lease_seconds, self._idle_seconds = lease_seconds, idle_seconds
        self._hold: _Hold | None = None

    def ask(self, identity: Identity, generation_seen: int, has_replica: bool) -> int | None:
        """Return the generation that this worker is to upload, or ``None`` if another one is at it.

        Raises:
            Refusal: ``BAD_REQUEST``, where the worker tells of an epoch that nobody has come to.
        """
        hold, now = self._hold, self._clock()
        if hold is not None and hold.identity != identity and self._is_at_it(hold):
            replica_beats_fresh = has_replica and not hold.from_replica
            if not replica_beats_fresh:
                return None
        previous = 0 if hold is None else hold.generation
        if epoch(generation_seen) > max(_MOST_EPOCH_SEEN, epoch(previous)):
            raise Rejected(
                ErrorCode.BAD_REQUEST,
                f"generation_seen is of epoch {epoch(generation_seen)}; it must be 0 to {_MOST_EPOCH_SEEN}, or shard 0 "
                "must know it. Where a shard really has such a model, restart all shards together, empty",
            )
        # Where a shard has this very generation, this worker has filled it; another one of its epoch is not its own.
        is_outdone = generation_seen != previous and epoch(generation_seen) >= epoch(previous)
        if hold is None or hold.identity != identity or is_outdone:
            generation = next_generation(max(previous, generation_seen))
            self._hold = hold = _Hold(identity, generation, has_replica, now, now)
            log.info("upload granted", extra={"worker": identity.worker_id, "generation": hold.generation})
        return hold.generation

    def require(self, identity: Identity, generation: int) -> None:
        """Check that it is this worker's turn, for this generation; raises :class:`Rejected` (``STALE_GENERATION``)."""
        hold = self._hold
        if hold is None or (hold.identity, hold.generation) != (identity, generation):
            raise Rejected(ErrorCode.STALE_GENERATION, "another worker holds the upload now")

    def note(self, identity: Identity, share: float) -> None:
        """Note how much of the whole model, 0 to 1, a worker has sent to all shards; only a new most counts."""
        hold = self._hold
        if hold is not None and hold.identity == identity and share > hold.share + _LEAST_RISE:
            hold.share, hold.moved = share, self._clock()

    def progress(self) -> pb.ModelProgress | None:
        """Return how far the upload has come; ``None`` where nobody is at it."""
        hold = self._hold
        if hold is None or not self._is_at_it(hold):
            return None
        left = (self._clock() - hold.began) * (1 - hold.share) / hold.share if hold.share else 0.0
        return pb.ModelProgress(worker_id=hold.identity.worker_id, share=hold.share, seconds_left=left)

    def leave(self, identity: Identity) -> None:
        """Note that a worker will not go on."""
        hold = self._hold
        if hold is not None and hold.identity == identity:
            hold.moved = -math.inf

    def end(self) -> None:
        """Note that the model is there."""
        self._hold = None

    def _is_at_it(self, hold: _Hold) -> bool:
        """Tell whether a worker is at its upload, or may be back for the rest of it sooner than all is sent again."""
        patience = self._idle_seconds
        if not self._is_live(hold.identity):
            patience = min(patience, self._lease_seconds + hold.moved - hold.began)
        return self._clock() - hold.moved < patience

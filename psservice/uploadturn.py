"""Whose turn it is to upload the model (docs/protocol.md, *Joining*)."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from pscore.generation import epoch, next_generation
from pscore.reasons import Reason, Refusal
from psservice.bounds import MOST_EPOCH_SEEN
from psservice.membership import Identity

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Hold:
    identity: Identity
    generation: int
    from_replica: bool


class UploadTurn:
    """The coordinator's memory of who is to upload; not thread-safe.

    Args:
        is_live: whether a worker holds a lease.
    """

    def __init__(self, is_live: Callable[[Identity], bool]) -> None:
        """Nobody is."""
        self._is_live = is_live
        self._hold: _Hold | None = None

    def ask(self, identity: Identity, generation_seen: int, has_replica: bool) -> int | None:
        """Return the generation that this worker is to upload, or ``None`` if another one is at it.

        Raises:
            Refusal: ``BAD_REQUEST``, where the worker tells of an epoch that nobody has come to.
        """
        hold = self._hold
        if hold is not None and self._is_live(hold.identity) and hold.identity != identity:
            replica_beats_fresh = has_replica and not hold.from_replica
            if not replica_beats_fresh:
                return None
        previous = 0 if hold is None else hold.generation
        if epoch(generation_seen) > max(MOST_EPOCH_SEEN, epoch(previous)):
            raise Refusal(
                Reason.BAD_REQUEST,
                f"generation_seen is of epoch {epoch(generation_seen)}; it must be 0 to {MOST_EPOCH_SEEN}, or shard 0 "
                "must know it. Where a shard really has such a model, restart all shards together, empty",
            )
        if hold is None or hold.identity != identity or epoch(generation_seen) >= epoch(previous):
            generation = next_generation(max(previous, generation_seen))
            self._hold = hold = _Hold(identity, generation, has_replica)
            log.info("upload granted", extra={"worker": identity.worker_id, "generation": hold.generation})
        return hold.generation

    def require(self, identity: Identity, generation: int) -> None:
        """Check that it is this worker's turn, for this generation; raises :class:`Refusal` (``STALE_GENERATION``)."""
        hold = self._hold
        if hold is None or (hold.identity, hold.generation) != (identity, generation):
            raise Refusal(Reason.STALE_GENERATION, "another worker holds the upload now")

    def end(self) -> None:
        """Note that the model is there."""
        self._hold = None

"""A publication of a feed, from its push to the version that readers get."""

import logging

from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.awaiting import NotYetError
from psservice.feed.feed_shard import FeedShard
from psservice.shard.lifecycle import end_if_over
from psservice.shard.shard import Shard
from psservice.state.v1 import journal_pb2 as rec
from psservice.values import Identity

log = logging.getLogger(__name__)


def require_base(shard: Shard, header: pb.PushHeader, update: SparseSlice | None, *, may_wait: bool) -> None:
    """Refuse a publication of differences from another version than the shard's; on the apply thread.

    The shard may not have heard yet that its staged version is published: then the call waits, if it may. Shard 0 may
    have lost that version, or gone back behind it, so that the wait is in vain. Raises :class:`Rejected`
    (``TOO_STALE``).
    """
    model = shard.require_model(header.generation)
    if not isinstance(model, FeedShard):
        return
    base = header.base_version
    is_awaited = base == model.staged.version > model.version and base != model.lacks and not shard.is_coordinator
    if is_awaited and may_wait:
        raise NotYetError(
            ErrorCode.BUSY,
            "shard 0 has not told yet that the version before is published",
            lambda: shard.model is not model or model.version >= base or model.lacks == base,
        )
    is_whole = update is not None and update.offsets is None  # for a version behind those of all shards
    if base != model.version and not (is_whole and base > model.version):
        raise Rejected(
            ErrorCode.TOO_STALE,
            f"words that differ from version {base}, and the feed has version {model.version}: publish all words",
        )


def publish(shard: Shard, identity: Identity, generation: int, version: int) -> int:
    """Publish the staged version on shard 0, once; return the feed's version then.

    Raises :class:`Rejected` (``TOO_STALE`` if it is not staged).
    """
    shard.leases.require(identity)

    def job() -> tuple[int, str]:
        model = _feed(shard, generation)
        shard.run.require_open()
        if model.version != version:
            if not version or model.staged.version != version:
                why = f"version {version} is not staged; the feed has version {model.version}: publish all words again"
                raise Rejected(ErrorCode.TOO_STALE, why)
            _commit(shard, version)
            end_if_over(shard)
        return model.staged.published

    found = shard.apply_thread.run(job)
    shard.wait_until_durable()
    shard.published = max(shard.published, found)  # the others may have no version that this shard loses
    shard.tell_shards()
    return found[0]


def hear(shard: Shard, version: int, name: str) -> None:
    """Publish the version that shard 0 has published, on another shard; in the thread that asks shard 0.

    Only what the same push has staged: another publication may have taken its place here, under the same number.
    """

    def job() -> None:
        model = shard.model
        if not isinstance(model, FeedShard) or model.version >= version:
            return
        if (model.staged.version, model.staged.name) == (version, name):
            _commit(shard, version)
        elif model.lacks != version:
            model.lacks = version
            log.error(
                "this shard lacks a version of the feed: readers keep the one before until another is published",
                extra={"version": version, "has_version": model.version},
            )

    shard.apply_thread.run(job)


def _feed(shard: Shard, generation: int) -> FeedShard:
    model = shard.require_model(generation)
    if not isinstance(model, FeedShard):
        raise Rejected(ErrorCode.BAD_REQUEST, "this run trains a model; versions are published of a feed")
    return model


def _commit(shard: Shard, version: int) -> None:
    shard.commit(rec.Published(version=version))
    shard.metrics.version = version
    log.info("version published", extra={"version": version})

"""Publications of feeds and relays: what every shard has staged becomes the version that readers get."""

import logging

from pscore.model.buffers import unpack
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.awaiting import NotYetError
from psservice.data_leases.dataset import Datasets
from psservice.feed.feed_shard import FeedShard
from psservice.feed.relayed_shard import RelayedShard
from psservice.model.buffers import BufferAverage
from psservice.shard import model_install
from psservice.shard.lifecycle import end_if_over
from psservice.shard.shard import Shard
from psservice.state.run import RunState
from psservice.state.state import ShardState
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


def publish_relayed(shard: Shard) -> bool:
    """Publish the source's cut that is staged on shard 0 of a relay, if every other shard has it; return whether.

    In the thread that follows the source. Raises :class:`Rejected` (``NOT_DURABLE``, ``BUSY``).
    """
    model, relaying = shard.model, shard.relaying
    assert relaying is not None
    if not isinstance(model, RelayedShard) or not model.staged.is_there or not relaying.others_have(model.staged.name):
        return False
    _bring_in(shard, model, model.staged.name)
    assert isinstance(shard.model, RelayedShard)
    shard.wait_until_durable()
    shard.published = shard.model.staged.published
    shard.tell_shards()
    return True


def hear_relayed(shard: Shard, name: str) -> None:
    """Publish the source's cut that shard 0 of a relay has published, on another shard, if it is staged here.

    In the thread that asks shard 0. Raises :class:`Rejected` (``NOT_DURABLE``, ``BUSY``).
    """
    model = shard.model
    if isinstance(model, RelayedShard) and name and model.staged.name == name != model.publication:
        _bring_in(shard, model, name)


def _bring_in(shard: Shard, model: RelayedShard, name: str) -> None:
    """Publish the cut staged under a name: a difference by a record, another generation's model by a snapshot."""

    def require_staged() -> None:
        if model.staged.name != name or shard.model is not model:
            raise Rejected(ErrorCode.BUSY, "another version is staged by now")

    def commit() -> bool:
        """Publish a difference; return whether it was one."""
        require_staged()
        if model.successor is None:
            _commit(shard, model.staged.version)
        return model.successor is None

    assert shard.relaying is not None
    if shard.apply_thread.run(commit):
        shard.relaying.publish(name)
        return

    def make() -> ShardState:
        require_staged()
        successor, buffers = model.successor, shard.state.buffers
        if successor is None:
            raise Rejected(ErrorCode.BUSY, "a difference is staged by now")
        if model.staged.buffers:
            buffers = BufferAverage(model.layout.buffers, unpack(model.staged.buffers, model.layout.buffers))
        successor.staged.published = successor.version, name
        return shard.state.with_model(
            successor, buffers, Datasets(), run_id=shard.run.run_id, run_state=RunState.TRAINING, samples=0
        )

    with shard.join_lock:
        model_install.claim(shard)
    model_install.install(shard, make)


def _feed(shard: Shard, generation: int) -> FeedShard:
    model = shard.require_model(generation)
    if not isinstance(model, FeedShard):
        raise Rejected(ErrorCode.BAD_REQUEST, "this run trains a model; versions are published of a feed")
    return model


def _commit(shard: Shard, version: int) -> None:
    shard.commit(rec.Published(version=version))
    shard.metrics.version = version
    level = logging.INFO if shard.relaying is None else logging.DEBUG  # of a run, a second's versions
    log.log(level, "version published", extra={"version": version})

"""A shard's status: as a message, for `GetStatus` and the status page, and as metrics that are read on request."""

import time

from pscore.model.layout import Span
from pscore.version import __version__
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.durability.replication import StandbyProgress
from psservice.membership.leases import Member
from psservice.observability.metrics import Metrics
from psservice.replies.reply_session import ReplyMode
from psservice.rpc.certificates import ServerCertificates
from psservice.settings import ServerSettings
from psservice.shard.following import RUN_STATES
from psservice.shard.shard import Shard
from psservice.state.run import RunState

REPLY_MODES = {ReplyMode.EXACT: pb.REPLY_MODE_EXACT, ReplyMode.TOPK: pb.REPLY_MODE_TOPK}
_DOWN_MODES = {"auto": pb.DOWN_MODE_AUTO, "exact": pb.DOWN_MODE_EXACT, "topk": pb.DOWN_MODE_TOPK}
_BUFFER_POLICIES = {"sync": pb.BUFFER_POLICY_SYNC, "local": pb.BUFFER_POLICY_LOCAL, "none": pb.BUFFER_POLICY_NONE}


_MOST_READERS = 1000  # in an answer


def status_of(shard: Shard, uptime_seconds: float, queued: int, *, brief: bool = False) -> pb.GetStatusResponse:
    """Return a shard's status now; ``queued`` counts pushes and pulls at work, ``brief`` leaves the workers out."""
    settings, traffic = shard.settings, shard.metrics.traffic
    pushes, pulls, buffers = traffic["PushSparse"], traffic["PullDiff"], traffic["ExchangeBuffers"]
    model, layout = shard.model, shard.state.layout
    span = shard.span if layout else Span(0, 0)
    last = shard.durability.last_snapshot
    snapshot = last.manifest if last else None
    return pb.GetStatusResponse(
        run_id=shard.run.run_id,
        run_state=RUN_STATES[shard.run.state],
        settings=run_settings(settings),
        method=shard.run.method,
        version=model.version if model else 0,
        generation=model.generation if model else 0,
        parameters=layout.size if layout else 0,
        start=span.start,
        length=span.length,
        shard_index=settings.shard_index,
        num_shards=settings.num_shards,
        ports_in_a_row=settings.shards > 1,
        device=str(shard.device),
        workers=[_worker_status(shard, member) for member in shard.leases.members() if not brief],
        push_bytes=pushes.received_bytes,
        pull_bytes=pulls.sent_bytes,
        buffer_bytes=buffers.received_bytes + buffers.sent_bytes,
        samples=shard.run.samples,
        queued=queued,
        uptime_seconds=uptime_seconds,
        server_version=__version__,
        durability=_durability(settings),
        snapshot_version=snapshot.version if snapshot else 0,
        snapshot_checkpoint=snapshot.checkpoint if snapshot else "",
        snapshot_age_seconds=max(0.0, time.time() - snapshot.created_unix_seconds) if snapshot else 0.0,
        journal_bytes=shard.durability.journal_bytes,
        draining=shard.drain_gate.is_closed,
        calls_inside=shard.drain_gate.in_flight,
        queue_limit=settings.apply_queue_limit,
        durable=shard.durability.is_healthy,
        pushes=pushes.answered,
        pulls=pulls.answered,
        dense_push_bytes=pushes.dense_bytes,
        dense_pull_bytes=pulls.dense_bytes,
        evicted=[
            pb.EvictedWorker(worker_id=name, remaining_seconds=seconds)
            for name, seconds in shard.leases.evicted().items()
        ],
        max_staleness=settings.max_staleness,
        origins=shard.state.histories.origins,
        known_shards=shard.state.histories.known(),
        cut_version=_cut_version(shard),
        readers=_readers(shard),
        relay=_relay(shard),
        replication=_replication(shard),
        replaced_by=shard.replaced_by,
        shards=shard.progress.known(),
    )


def _progress(shard: Shard) -> StandbyProgress:
    version = shard.model.version if shard.model else 0
    return shard.durability.replication.progress(shard.durability.newest_position(), version)


def _behind(shard: Shard) -> StandbyProgress:
    """Return how far the standby is; as one that has everything if none has ever followed."""
    progress = _progress(shard)
    return progress if progress.standby else StandbyProgress("", False, 0, 0, 0.0)


def _replication(shard: Shard) -> pb.ReplicationStatus | None:
    progress, is_required = _progress(shard), shard.durability.replication.is_required
    if not progress.standby and not is_required:
        return None
    return pb.ReplicationStatus(
        standby=progress.standby,
        connected=progress.is_connected,
        acknowledged=is_required,
        behind_bytes=progress.behind_bytes,
        behind_versions=progress.behind_versions,
        behind_seconds=progress.behind_seconds,
    )


def _cut_version(shard: Shard) -> int:
    cut = shard.cuts.newest
    return cut.version if cut else 0


def _readers(shard: Shard) -> list[pb.ReaderStatus]:
    now = shard.environment.monotonic()
    return [
        pb.ReaderStatus(reader=each.name, version=each.version, behind_seconds=each.behind_seconds(now))
        for each in shard.cuts.readers.all()[:_MOST_READERS]
    ]


def _relay(shard: Shard) -> pb.RelayStatus | None:
    relaying = shard.relaying
    if relaying is None:
        return None
    return pb.RelayStatus(
        source=shard.settings.relay_of,
        lost_seconds=relaying.lost_seconds,
        error=relaying.error,
        source_version=relaying.source_version(shard.settings.shard_index),
        behind_seconds=relaying.behind_seconds,
    )


def _longest_behind(shard: Shard) -> float:
    now = shard.environment.monotonic()
    return max((each.behind_seconds(now) for each in shard.cuts.readers.all()), default=0.0)


def _worker_status(shard: Shard, member: Member) -> pb.WorkerStatus:
    now = shard.leases.clock()
    return pb.WorkerStatus(
        worker_id=member.identity.worker_id,
        incarnation=member.identity.incarnation,
        last_step=member.last_step,
        staleness=member.staleness,
        pushes=member.pushes,
        push_bytes=member.push_bytes,
        pull_bytes=member.pull_bytes,
        samples=member.samples,
        lease_remaining_seconds=max(0.0, member.lease_end - now),
        reply_mode=REPLY_MODES[member.reply_mode] if member.reply_mode else pb.REPLY_MODE_UNSPECIFIED,
        reply_density=member.reply_density,
        idle_seconds=max(0.0, now - member.clock_moved),
        interval_seconds=member.interval_seconds,
        release=member.release,
        loss=member.loss,
    )


def run_settings(settings: ServerSettings) -> pb.RunSettings:
    """Write the settings that workers receive."""
    return pb.RunSettings(
        down_mode=_DOWN_MODES[settings.down_mode],
        buffer_policy=_BUFFER_POLICIES[settings.buffers],
        buffer_period_steps=settings.buffer_period_steps,
        chunk_bytes=settings.chunk_bytes,
        lease_seconds=settings.lease_seconds,
    )


def _durability(settings: ServerSettings) -> str:
    return settings.durability if settings.data_dir else "none"


def bind_certificates(metrics: Metrics, certificates: ServerCertificates | None) -> None:
    """Bind the metrics of TLS; without TLS no certificate has a series."""
    metrics.certificate_ends.read = lambda: certificates.ends if certificates else {}
    metrics.handshakes.read = lambda: certificates.handshakes if certificates else 0


def bind_metrics(shard: Shard) -> None:
    """Bind the shard's metrics to its state, and set those that are settings."""
    metrics, settings = shard.metrics, shard.settings
    for gauge, value in (
        (metrics.num_shards, settings.num_shards),
        (metrics.lease_seconds, settings.lease_seconds),
        (metrics.ssp_bound, shard.admission.ssp_bound),
        (metrics.max_staleness, settings.max_staleness),
        (metrics.queue_limit, settings.apply_queue_limit),
        (metrics.call_limit, settings.rpc_threads),
        (metrics.snapshot_interval_seconds, shard.durability.snapshot_interval_seconds),
    ):
        gauge.set(value)
    metrics.image_bytes.set_function(lambda: shard.memory.images)
    metrics.live_workers.set_function(lambda: len(shard.leases))
    metrics.clock_spread.set_function(shard.leases.clock_spread)
    metrics.readers.set_function(lambda: len(shard.cuts.readers))
    metrics.cut_version.set_function(lambda: _cut_version(shard))
    metrics.reader_behind_seconds.set_function(lambda: _longest_behind(shard))
    if (relaying := shard.relaying) is not None:
        metrics.source_lost_seconds.set_function(lambda: relaying.lost_seconds)
        metrics.source_behind_seconds.set_function(lambda: relaying.behind_seconds)
    metrics.standby_connected.set_function(lambda: _progress(shard).is_connected)
    metrics.standby_behind_bytes.set_function(lambda: _behind(shard).behind_bytes)
    metrics.standby_behind_versions.set_function(lambda: _behind(shard).behind_versions)
    metrics.standby_behind_seconds.set_function(lambda: _behind(shard).behind_seconds)
    metrics.replaced.set_function(lambda: bool(shard.replaced_by))
    metrics.training.set_function(lambda: shard.run.state is RunState.TRAINING)
    metrics.draining.set_function(lambda: shard.drain_gate.is_closed)
    metrics.durable.set_function(lambda: shard.durability.is_healthy)
    metrics.elements.set_function(lambda: shard.span.length if shard.state.layout else 0)
    metrics.lost_versions.read = lambda: shard.state.histories.lost()
    metrics.journal_bytes.read = lambda: shard.durability.journal_bytes
    metrics.journal_errors.read = lambda: shard.durability.journal_errors
    metrics.snapshot_errors.read = lambda: shard.durability.snapshot_errors
    metrics.shard_info.read = lambda: {
        "run": shard.run.run_id,
        "shard": str(settings.shard_index),
        "shards": str(settings.num_shards),
        "method": shard.run.method,
        "device": str(shard.device),
        "durability": _durability(settings),
        "release": __version__,
    }

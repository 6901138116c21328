"""Metrics of a running shard that are read on request, and the bounds that they are judged by."""

from collections.abc import Callable

from pscore.version import __version__
from psservice.cluster.run import RunState
from psservice.shard.shard import Shard


def bind_metrics(shard: Shard, running_calls: Callable[[], int]) -> None:
    """Bind the shard's metrics to its state, and set those that are settings."""
    metrics, settings = shard.metrics, shard.settings
    for gauge, value in (
        (metrics.num_shards, settings.num_shards),
        (metrics.lease_seconds, settings.lease_seconds),
        (metrics.ssp_bound, shard.admission.ssp_bound),
        (metrics.max_staleness, settings.max_staleness),
        (metrics.queue_limit, settings.apply_queue_limit),
        (metrics.call_limit, settings.rpc_threads),
        (metrics.bytes_in_flight_limit, settings.inflight_bytes),
        (metrics.image_bytes_limit, settings.image_bytes),
        (metrics.snapshot_interval_seconds, shard.durability.snapshot_interval_seconds),
    ):
        gauge.set(value)
    metrics.queued.set_function(lambda: shard.apply_thread.queued)
    metrics.image_bytes.set_function(lambda: shard.topk.images.bytes)
    metrics.running_calls.set_function(running_calls)
    metrics.live_workers.set_function(lambda: len(shard.leases))
    metrics.clock_spread.set_function(shard.leases.clock_spread)
    metrics.training.set_function(lambda: shard.run.state is RunState.TRAINING)
    metrics.draining.set_function(lambda: shard.drain_gate.is_closed)
    metrics.elements.set_function(lambda: shard.span.length if shard.layout else 0)
    metrics.journal_bytes.set_function(lambda: shard.durability.journal_bytes)
    metrics.journal_errors.set_function(lambda: shard.durability.journal_errors)
    metrics.snapshot_errors.set_function(lambda: shard.durability.snapshot_errors)
    metrics.shard_info.set_function(
        lambda: {
            "run": shard.run.run_id,
            "shard": str(settings.shard_index),
            "shards": str(settings.num_shards),
            "method": shard.run.method,
            "device": str(shard.device),
            "durability": settings.durability if settings.data_dir else "none",
            "release": __version__,
        }
    )

"""Prometheus metrics of one shard, in a registry of their own."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from psservice.membership import PushAnswer
from psservice.shard.replies import Reply

_STALENESS_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_SECONDS_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_SCALE_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.5, 2.0, 5.0)
_DENSITY_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class Metrics:
    """What a shard counts; names begin with ``psservice_``."""

    def __init__(self) -> None:
        """Create every metric at zero."""
        self.registry = CollectorRegistry()
        registry = self.registry
        self.pushes = Counter("psservice_pushes", "Pushes applied", registry=registry)
        self.repeated_pushes = Counter("psservice_repeated_pushes", "Pushes answered again", registry=registry)
        self.pulls = Counter("psservice_pulls", "Pulls answered", ["mode"], registry=registry)
        self.refusals = Counter("psservice_refusals", "Calls refused", ["reason"], registry=registry)
        self.received_bytes = Counter("psservice_received_bytes", "Message bytes received", ["rpc"], registry=registry)
        self.sent_bytes = Counter("psservice_sent_bytes", "Message bytes sent", ["rpc"], registry=registry)
        self.leases_expired = Counter("psservice_leases_expired", "Workers taken for dead", registry=registry)
        self.staleness = Histogram(
            "psservice_staleness", "Versions between base and push", buckets=_STALENESS_BUCKETS, registry=registry
        )
        self.round_contributors = Histogram(
            "psservice_round_contributors",
            "Workers whose update is in a synchronous round",
            buckets=_STALENESS_BUCKETS,
            registry=registry,
        )
        self.applied_scale = Histogram(
            "psservice_applied_scale",
            "What pushes were multiplied by because of staleness or speed",
            buckets=_SCALE_BUCKETS,
            registry=registry,
        )
        self.apply_seconds = Histogram(
            "psservice_apply_seconds", "Time of the writer to apply a push", buckets=_SECONDS_BUCKETS, registry=registry
        )
        self.reply_density = Histogram(
            "psservice_reply_density", "Density of replies", buckets=_DENSITY_BUCKETS, registry=registry
        )
        self.live_workers = Gauge("psservice_live_workers", "Workers holding a lease", registry=registry)
        self.version = Gauge("psservice_version", "Version of the shard", registry=registry)
        self.clock_spread = Gauge(
            "psservice_clock_spread", "Pushes from the slowest live worker to the fastest", registry=registry
        )
        self.bytes_in_flight = Gauge("psservice_bytes_in_flight", "What calls occupy now", registry=registry)
        self.calls_cut = Counter(
            "psservice_calls_cut", "Calls cancelled because the client stalled", ["rpc", "why"], registry=registry
        )
        self.queued = Gauge("psservice_queued", "Jobs waiting for the writer", registry=registry)
        self.durable = Gauge("psservice_durable", "1 while pushes can be written down as promised", registry=registry)
        self.durable.set(1)
        self.journal_bytes = Gauge("psservice_journal_bytes", "Appended to the journal since start", registry=registry)
        self.snapshot_version = Gauge("psservice_snapshot_version", "Version of the newest snapshot", registry=registry)
        self.snapshot_unix_seconds = Gauge(
            "psservice_snapshot_unix_seconds", "When the newest snapshot was taken", registry=registry
        )

    def follow(self, queued: Callable[[], int], journal_bytes: Callable[[], int]) -> None:
        """Ask for these numbers whenever they are read."""
        self.queued.set_function(queued)
        self.journal_bytes.set_function(journal_bytes)

    def observe_snapshot(self, version: int, unix_seconds: float) -> None:
        """Note the newest snapshot."""
        self.snapshot_version.set(version)
        self.snapshot_unix_seconds.set(unix_seconds)

    def observe_push(self, answer: PushAnswer, version: int) -> None:
        """Count a push that was taken; ``version`` is the shard's now."""
        self.pushes.inc()
        self.version.set(version)
        self.applied_scale.observe(answer.applied_scale)
        self.staleness.observe(answer.staleness)
        self.apply_seconds.observe(answer.apply_nanoseconds / 1e9)

    def observe_pull(self, reply: Reply) -> None:
        """Count a pull that was answered."""
        self.pulls.labels(mode=reply.mode.value).inc()
        self.reply_density.observe(reply.density)

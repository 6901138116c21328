"""Prometheus metrics of one shard, in a registry of their own: all of them are declared here.

What happens is counted where it happens; what simply is (a queue's length, a bound) is read when somebody asks
(:mod:`psservice.app.metric_bindings`). docs/metrics.md is generated from what this file declares.
"""

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from pscore.wire.errors import ErrorCode
from psservice.model.reply_session import Reply
from psservice.observability.traffic import COUNTED
from psservice.types import PushAnswer

_STALENESS_BUCKETS = (0, *(1 << power for power in range(17)))  # to 65,536: SparsepsStalenessHigh asks for 32,768
_SECONDS_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_SCALE_BUCKETS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.5, 2.0, 5.0)
_DENSITY_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_CALL_SECONDS_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series beside each counter and histogram, which nothing reads


class ReadCounter(Collector):
    """A counter whose value is kept elsewhere, and read when somebody asks."""

    def __init__(self, name: str, documentation: str, registry: CollectorRegistry) -> None:
        """Register at zero; ``name`` goes without its ``_total``."""
        self._name, self._documentation = name, documentation
        self._read: Callable[[], float] = float
        registry.register(self)

    def set_function(self, read: Callable[[], float]) -> None:
        """Read the value here from now on."""
        self._read = read

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Read it."""
        return [CounterMetricFamily(self._name, self._documentation, self._read())]


class ReadInfo(Collector):
    """Labels that describe a process, with the value 1; read when somebody asks, since a run's name comes later."""

    def __init__(self, name: str, documentation: str, labels: Iterable[str], registry: CollectorRegistry) -> None:
        """Register with empty labels; ``name`` goes without its ``_info``."""
        self._name, self._documentation = name, documentation
        self.labels = tuple(labels)
        self._read: Callable[[], Mapping[str, str]] = lambda: dict.fromkeys(self.labels, "")
        registry.register(self)

    def set_function(self, read: Callable[[], Mapping[str, str]]) -> None:
        """Read the labels here from now on."""
        self._read = read

    def collect(self) -> Iterable[InfoMetricFamily]:
        """Read them."""
        found = self._read()
        return [InfoMetricFamily(self._name, self._documentation, {name: found[name] for name in self.labels})]


class Metrics:
    """What a shard counts and tells; names begin with ``psservice_``."""

    def __init__(self) -> None:
        """Create every metric at zero."""
        self.registry = CollectorRegistry()
        self._declare_work()
        self._declare_fleet()
        self._declare_load()
        self._declare_durability()
        self.shard_info = ReadInfo(
            "psservice_shard",
            "Always 1; which shard of which run this is, to be joined with the others by instance",
            ("run", "shard", "shards", "method", "device", "durability", "release"),
            self.registry,
        )
        ProcessCollector(registry=self.registry)
        for rpc in COUNTED:  # a rate needs the zero before the first one
            for counter in (self.received_bytes, self.sent_bytes, self.dense_bytes):
                counter.labels(rpc=rpc)
        for reason in ErrorCode:
            self.refusals.labels(reason=reason.name)
        self._started_unix_seconds = time.time()
        self._is_saved = True

    def _declare_work(self) -> None:
        registry = self.registry
        self.pushes = Counter("psservice_pushes", "Pushes applied", registry=registry)
        self.repeated_pushes = Counter("psservice_repeated_pushes", "Pushes answered again", registry=registry)
        self.pulls = Counter("psservice_pulls", "Pulls answered, by exact or topk", ["mode"], registry=registry)
        self.refusals = Counter("psservice_refusals", "Calls refused, by reason", ["reason"], registry=registry)
        self.received_bytes = Counter("psservice_received_bytes", "Message bytes received", ["rpc"], registry=registry)
        self.sent_bytes = Counter("psservice_sent_bytes", "Message bytes sent", ["rpc"], registry=registry)
        self.dense_bytes = Counter(
            "psservice_dense_bytes",
            "What the same pushes and pulls would weigh with every parameter in them; less what was received or sent, "
            "it is what was saved",
            ["rpc"],
            registry=registry,
        )
        self.staleness = Histogram(
            "psservice_staleness",
            "Pushes of others between a push's base version and the push",
            buckets=_STALENESS_BUCKETS,
            registry=registry,
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
        self.version = Gauge("psservice_version", "Version of the shard", registry=registry)
        self.training = Gauge(
            "psservice_training", "1 while there is a model and the run is not over", registry=registry
        )
        self.last_push_unix_seconds = Gauge(
            "psservice_last_push_unix_seconds",
            "When the newest push was applied; 0 before the first",
            registry=registry,
        )
        self.elements = Gauge("psservice_elements", "Elements of the model that this shard owns", registry=registry)
        self.num_shards = Gauge("psservice_shards", "Shards that the model is cut into", registry=registry)

    def _declare_fleet(self) -> None:
        registry = self.registry
        self.live_workers = Gauge("psservice_live_workers", "Workers holding a lease", registry=registry)
        self.joins = Counter("psservice_joins", "Leases granted to workers that held none", registry=registry)
        self.leaves = Counter("psservice_leaves", "Leases that workers gave back", registry=registry)
        self.leases_expired = Counter("psservice_leases_expired", "Workers taken for dead", registry=registry)
        self.lease_seconds = Gauge("psservice_lease_seconds", "Life of a lease without renewal", registry=registry)
        self.clock_spread = Gauge(
            "psservice_clock_spread", "Pushes from the slowest live worker to the fastest", registry=registry
        )
        self.ssp_bound = Gauge(
            "psservice_ssp_bound",
            "Pushes that a worker may be ahead of the slowest live one; 0 for no bound",
            registry=registry,
        )
        self.max_staleness = Gauge(
            "psservice_max_staleness", "Staleness above which pushes are refused; 0 for no cut-off", registry=registry
        )

    def _declare_load(self) -> None:
        registry = self.registry
        self.queued = Gauge("psservice_queued", "Jobs waiting for the writer", registry=registry)
        self.queue_limit = Gauge("psservice_queue_limit", "Jobs that may wait for the writer", registry=registry)
        self.queue_seconds = Histogram(
            "psservice_queue_seconds",
            "Time that a job waited for the writer",
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self.running_calls = Gauge(
            "psservice_running_calls", "Calls that a thread works on, or that wait for one", registry=registry
        )
        self.call_limit = Gauge(
            "psservice_call_limit", "Calls that threads work on at once; others wait", registry=registry
        )
        self.call_seconds = Histogram(
            "psservice_call_seconds",
            "Time from a call's begin to its end, its client's pauses included",
            ["rpc"],
            buckets=_CALL_SECONDS_BUCKETS,
            registry=registry,
        )
        self.calls_cut = Counter(
            "psservice_calls_cut", "Calls cancelled because the client stalled", ["rpc", "why"], registry=registry
        )
        self.bytes_in_flight = Gauge("psservice_bytes_in_flight", "What calls occupy now", registry=registry)
        self.bytes_in_flight_limit = Gauge(
            "psservice_bytes_in_flight_limit", "What calls may occupy before others are sent away", registry=registry
        )
        self.image_bytes = Gauge("psservice_image_bytes", "What images of workers' replicas occupy", registry=registry)
        self.image_bytes_limit = Gauge(
            "psservice_image_bytes_limit", "What images may occupy before replies are exact", registry=registry
        )
        self.draining = Gauge("psservice_draining", "1 while the server takes no new pushes", registry=registry)

    def _declare_durability(self) -> None:
        registry = self.registry
        self.durable = Gauge("psservice_durable", "1 while pushes can be written down as promised", registry=registry)
        self.durable.set(1)
        self.journal_bytes = ReadCounter("psservice_journal_bytes", "Bytes appended to the journal", registry)
        self.journal_errors = ReadCounter(
            "psservice_journal_errors", "Failed attempts to write the journal or to force it to the disk", registry
        )
        self.snapshot_version = Gauge("psservice_snapshot_version", "Version of the newest snapshot", registry=registry)
        self.snapshot_unix_seconds = Gauge(
            "psservice_snapshot_unix_seconds", "When the newest snapshot was taken", registry=registry
        )
        self.snapshot_interval_seconds = Gauge(
            "psservice_snapshot_interval_seconds",
            "Longest time between two snapshots of a model that changes; 0 where none are taken",
            registry=registry,
        )
        self.snapshot_write_seconds = Gauge(
            "psservice_snapshot_write_seconds", "Time that writing the newest snapshot took", registry=registry
        )
        self.unsaved_since_unix_seconds = Gauge(
            "psservice_unsaved_since_unix_seconds",
            "When the oldest push was applied that is in no snapshot; 0 where there is none",
            registry=registry,
        )
        self.snapshot_errors = ReadCounter("psservice_snapshot_errors", "Snapshots that could not be written", registry)

    def observe_snapshot(self, version: int, unix_seconds: float) -> None:
        """Note the newest snapshot; what is newer than it was applied after it, or replayed when this process began."""
        self.snapshot_version.set(version)
        self.snapshot_unix_seconds.set(unix_seconds)
        (now,) = next(iter(self.version.collect())).samples
        saved = now.value == version
        self.unsaved_since_unix_seconds.set(0.0 if saved else max(unix_seconds, self._started_unix_seconds))
        self._is_saved = saved

    def observe_push(self, answer: PushAnswer, version: int) -> None:
        """Count a push that was taken; ``version`` is the shard's now."""
        self.pushes.inc()
        self.last_push_unix_seconds.set(time.time())
        if self._is_saved:
            self._is_saved = False
            self.unsaved_since_unix_seconds.set_to_current_time()
        self.version.set(version)
        self.applied_scale.observe(answer.applied_scale)
        self.staleness.observe(answer.staleness)
        self.apply_seconds.observe(answer.apply_nanoseconds / 1e9)

    def observe_pull(self, reply: Reply) -> None:
        """Count a pull that was answered."""
        self.pulls.labels(mode=reply.mode.value).inc()
        self.reply_density.observe(reply.density)

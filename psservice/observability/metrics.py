"""Prometheus metrics of one shard, in a registry of their own: all of them are declared here.

Events are counted where they happen; states (a queue's length, a bound) are read on request
(:func:`psservice.rpc.status.bind_metrics`). docs/reference/metrics.md is generated from what this file declares.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from pscore.wire.errors import ErrorCode
from psservice.values import PushAnswer


class ReadMetric(Collector):
    """A metric whose value another object has, read on request by ``read``, which may be replaced."""

    def __init__(self, family: Callable[[Any], Metric], read: Callable[[], Any], registry: CollectorRegistry) -> None:
        self._family, self.read = family, read
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Read the value."""
        return [self._family(self.read())]


def labelled(family: Callable[..., Any], name: str, documentation: str, label: str) -> Callable[[Any], Metric]:
    """Return the maker of a family of metrics that takes the values by their label."""

    def make(values: Mapping[str, float]) -> Metric:
        made: Metric = family(name, documentation, labels=[label])
        for key, value in values.items():
            made.add_metric([key], value)  # type: ignore[attr-defined]  # of each kind of family
        return made

    return make


class Observations:
    """How many values are up to each of the ``bounds``, ascending, and their sum. Thread-safe."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Count a value."""
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Return the buckets as Prometheus has them, and the sum."""
        with self._lock:
            counts, total = [*self._counts], self._sum
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        return [*zip(names, map(float, accumulate(counts)), strict=True)], total


class RequestHistogram(Collector):
    """A histogram, by the values of ``label`` if there is one, each made at its first use; else with ``observe``."""

    observe: Callable[[float], None]

    def __init__(
        self, name: str, documentation: str, bounds: Sequence[float], registry: CollectorRegistry, label: str = ""
    ) -> None:
        self.name, self.labels = name, (label,) if label else ()
        self._documentation, self._bounds = documentation, bounds
        self._series: dict[tuple[str, ...], Observations] = {}
        if not label:
            self.observe = self.of().observe
        registry.register(self)

    def of(self, *values: str) -> Observations:
        """Return the series of a label's value."""
        return self._series.setdefault(values, Observations(self._bounds))

    def collect(self) -> Iterable[Metric]:
        """Read all series."""
        family = HistogramMetricFamily(self.name, self._documentation, labels=self.labels)
        for values, series in [*self._series.items()]:
            family.add_metric(values, *series.read())
        return [family]


@dataclass(slots=True)
class Traffic:
    """Counts of one kind of call; ``dense_bytes`` are those of the same calls if each had every parameter."""

    answered: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    dense_bytes: int = 0


_STALENESS_BUCKETS = (0, *(1 << power for power in range(17)))  # to 65,536: SparsepsStalenessHigh asks for 32,768
_SECONDS_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_CALL_SECONDS_BUCKETS = (*_SECONDS_BUCKETS[2:], 300.0, 1000.0, 3000.0)  # 4 GB at 10 Mbit/s take an hour
_DENSITY_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_BYTES_BUCKETS = tuple(float(1 << power) for power in range(10, 33, 2))  # 1 KiB to 4 GiB: 1 G parameters, dense

_COUNTED_CALLS = ("PushSparse", "PullDiff", "ExchangeBuffers", "ReadCut")

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series beside each counter and histogram, which nothing reads


class Metrics:
    """All metrics of a shard; their names begin with ``psservice_``.

    Attributes:
        version: the shard's.
        pushes: applied.
        pulls: answered, by the reply's mode.
        traffic: by kind of call, of those that move parameters or buffers.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)

        def read(family: Callable[..., Any], name: str, documentation: str, value: Callable[[], Any]) -> ReadMetric:
            return ReadMetric(partial(family, name, documentation), value, registry)

        def histogram(name: str, documentation: str, bounds: tuple[float, ...], label: str = "") -> RequestHistogram:
            return RequestHistogram(name, documentation, bounds, registry, label)

        self.version = self.pushes = 0
        self.last_push_unix_seconds = 0.0
        self.pulls = {"exact": 0, "topk": 0}
        self.traffic = {rpc: Traffic() for rpc in _COUNTED_CALLS}
        self._lock = threading.Lock()
        self.read = [
            read(CounterMetricFamily, "psservice_pushes", "Pushes applied", lambda: self.pushes),
            read(GaugeMetricFamily, "psservice_version", "Version of the shard", lambda: self.version),
            read(
                GaugeMetricFamily,
                "psservice_last_push_unix_seconds",
                "When the newest push was applied; 0 before the first",
                lambda: self.last_push_unix_seconds,
            ),
            ReadMetric(
                labelled(CounterMetricFamily, "psservice_pulls", "Pulls answered, by exact or topk", "mode"),
                lambda: self.pulls,
                registry,
            ),
        ]
        for counted, documentation in (
            ("received_bytes", "Message bytes received"),
            ("sent_bytes", "Message bytes sent"),
            (
                "dense_bytes",
                "Bytes of the same pushes and pulls if each had every parameter; minus the bytes received or sent, "
                "this is the saving",
            ),
        ):
            family = labelled(CounterMetricFamily, f"psservice_{counted}", documentation, "rpc")
            self.read.append(ReadMetric(family, partial(self._of_traffic, counted), registry))
        self.repeated_pushes = counter(
            "psservice_repeated_pushes", "Pushes that had been applied and were answered again"
        )
        self.refusals = counter("psservice_refusals", "Calls refused, by reason", ["reason"])
        self.staleness = histogram(
            "psservice_staleness",
            "Pushes of other workers that were applied between a push's base version and the push",
            _STALENESS_BUCKETS,
        )
        self.round_contributors = Histogram(
            "psservice_round_contributors",
            "Workers whose update is in a synchronous round",
            buckets=_STALENESS_BUCKETS,
            registry=registry,
        )
        self.apply_seconds = histogram(
            "psservice_apply_seconds",
            "Time of the apply thread for a push; on a GPU, work that is queued there goes on after that",
            _SECONDS_BUCKETS,
        )
        self.push_size_bytes = histogram(
            "psservice_push_size_bytes", "Message bytes received in one push, repeated ones too", _BYTES_BUCKETS
        )
        self.reply_density = histogram("psservice_reply_density", "Density of replies", _DENSITY_BUCKETS)
        self.training = gauge("psservice_training", "1 while there is a model and the run is not over")
        self.elements = gauge("psservice_elements", "Elements of the model that this shard owns")
        self.num_shards = gauge("psservice_shards", "Number of shards of the model")

        self.live_workers = gauge("psservice_live_workers", "Workers with a lease")
        self.joins = counter("psservice_joins", "Leases granted to workers that had none")
        self.leaves = counter("psservice_leaves", "Leases that workers ended")
        self.leases_expired = counter("psservice_leases_expired", "Leases that ended because nobody renewed them")
        self.lease_seconds = gauge("psservice_lease_seconds", "Time after which a lease ends without renewal")
        self.clock_spread = gauge(
            "psservice_clock_spread", "Pushes of the fastest live worker minus those of the slowest"
        )
        self.ssp_bound = gauge(
            "psservice_ssp_bound", "Pushes that a worker may be ahead of the slowest live one; 0 for no bound"
        )
        self.max_staleness = gauge(
            "psservice_max_staleness", "Staleness above which pushes are refused; 0 for no limit"
        )

        self.source_lost_seconds = gauge(
            "psservice_source_lost_seconds", "Seconds for which a relay has not followed its source; 0 while it does"
        )
        self.source_behind_seconds = gauge(
            "psservice_source_behind_seconds", "Seconds for which a relay's readers have lacked a cut that it knows of"
        )
        self.standby_connected = gauge("psservice_standby_connected", "1 while a standby follows this shard")
        self.standby_behind_bytes = gauge(
            "psservice_standby_behind_bytes", "Bytes of the journal that the standby lacks; 0 if none has ever followed"
        )
        self.standby_behind_versions = gauge(
            "psservice_standby_behind_versions", "Versions that the standby lacks; 0 if none has ever followed"
        )
        self.standby_behind_seconds = gauge(
            "psservice_standby_behind_seconds",
            "Seconds for which the standby has lacked something; 0 if none has ever followed",
        )
        self.replaced = gauge("psservice_replaced", "1 if a standby serves in this shard's place, which serves nobody")
        self.readers = gauge("psservice_readers", "Readers that follow the model, on shard 0")
        self.cut_version = gauge(
            "psservice_cut_version", "Version of shard 0 in the newest cut for readers; 0 if there is none"
        )
        self.reader_behind_seconds = gauge(
            "psservice_reader_behind_seconds", "Longest time for which a reader has lacked the newest cut"
        )

        self.queued = gauge("psservice_queued", "Pushes and pulls at work, or waiting for a thread")
        self.queue_limit = gauge("psservice_queue_limit", "Pushes and pulls at work, beyond which pushes are refused")
        self.queue_seconds = histogram(
            "psservice_queue_seconds", "Time of a job in the apply thread's queue", _SECONDS_BUCKETS
        )
        self.running_calls = gauge("psservice_running_calls", "Calls that a thread works on, or that wait for a thread")
        self.call_limit = gauge("psservice_call_limit", "Calls that threads work on at once; others wait")
        self.call_seconds = histogram(
            "psservice_call_seconds",
            "Time of a call, or of a request on an open stream, with its client's pauses",
            _CALL_SECONDS_BUCKETS,
            "rpc",
        )
        self.calls_cut = counter("psservice_calls_cut", "Calls cancelled because the client stalled", ["rpc", "why"])
        self.bytes_in_flight = gauge(
            "psservice_bytes_in_flight", "Memory of received and sent messages, and of copies kept for answers, bytes"
        )
        self.bytes_in_flight_limit = gauge(
            "psservice_bytes_in_flight_limit", "Memory that these may occupy before other calls are refused, bytes"
        )
        self.memory_bytes = gauge(
            "psservice_memory_bytes", "Memory that grows with calls and workers, which --memory-bytes limits, bytes"
        )
        self.memory_bytes_limit = gauge("psservice_memory_bytes_limit", "The limit of that, bytes")
        self.image_bytes = gauge("psservice_image_bytes", "Memory of the images of workers' replicas, bytes")
        self.lost_versions = ReadMetric(
            labelled(
                GaugeMetricFamily,
                "psservice_lost_versions",
                "Versions of a shard that were seen and that it has lost, by its index; known to this shard",
                "of_shard",
            ),
            lambda: {"0": 0.0},
            registry,
        )
        self.draining = gauge("psservice_draining", "1 while the server refuses new pushes")

        def read_counter(name: str, documentation: str) -> ReadMetric:
            return read(CounterMetricFamily, name, documentation, lambda: 0.0)

        self.follows_coordinator = gauge(
            "psservice_follows_coordinator", "1 while shard 0 answers, on the other shards; 0 on shard 0"
        )
        self.durable = gauge("psservice_durable", "1 while pushes can be written to the disk as --durability promises")
        self.journal_bytes = read_counter("psservice_journal_bytes", "Bytes appended to the journal")
        self.journal_errors = read_counter(
            "psservice_journal_errors", "Failed attempts to write the journal or to force it to the disk"
        )
        self.snapshot_version = gauge("psservice_snapshot_version", "Version of the newest snapshot")
        self.snapshot_unix_seconds = gauge("psservice_snapshot_unix_seconds", "When the newest snapshot was taken")
        self.snapshot_interval_seconds = gauge(
            "psservice_snapshot_interval_seconds",
            "Longest time between two snapshots of a model that changes; 0 if none are taken",
        )
        self.snapshot_write_seconds = gauge(
            "psservice_snapshot_write_seconds", "Time in which the newest snapshot was written"
        )
        self.unsaved_since_unix_seconds = gauge(
            "psservice_unsaved_since_unix_seconds",
            "When the oldest push that is in no snapshot was applied; 0 if there is none",
        )
        self.snapshot_errors = read_counter("psservice_snapshot_errors", "Snapshots that could not be written")

        self.certificate_ends = ReadMetric(
            labelled(
                GaugeMetricFamily,
                "psservice_certificate_expiry_unix_seconds",
                "When a certificate in use ends, by the setting that names its file; of a chain, the first end",
                "certificate",
            ),
            lambda: {"tls_cert": 0.0},
            registry,
        )
        self.handshakes = read_counter(
            "psservice_handshakes",
            "TLS handshakes begun at the port for workers; one that fails is followed by no call",
        )

        labels = ("run", "shard", "shards", "method", "device", "durability", "release")
        about = "Always 1; which shard of which run this is, to be joined with the others by instance"
        self.shard_info = ReadMetric(  # a run's name is known later
            partial(InfoMetricFamily, "psservice_shard", about), lambda: dict.fromkeys(labels, ""), registry
        )
        ProcessCollector(registry=registry)
        for reason in ErrorCode:  # a rate needs the zero before the first one
            self.refusals.labels(reason=reason.name)
        self._started_unix_seconds = time.time()
        self._is_saved = True

    def observe_snapshot(self, version: int, unix_seconds: float) -> None:
        """Note the newest snapshot; newer pushes were applied after it, or replayed when this process began."""
        self.snapshot_version.set(version)
        self.snapshot_unix_seconds.set(unix_seconds)
        saved = self.version == version
        self.unsaved_since_unix_seconds.set(0.0 if saved else max(unix_seconds, self._started_unix_seconds))
        self._is_saved = saved

    def observe_push(self, answer: PushAnswer, version: int) -> None:
        """Count a push that was applied; ``version`` is the shard's now. On the apply thread."""
        self.pushes += 1
        self.version, self.last_push_unix_seconds = version, time.time()
        if self._is_saved:
            self._is_saved = False
            self.unsaved_since_unix_seconds.set_to_current_time()
        self.staleness.observe(answer.staleness)
        self.apply_seconds.observe(answer.apply_nanoseconds / 1e9)

    def observe_pull(self, mode: str, density: float) -> None:
        """Count a pull that was answered."""
        with self._lock:
            self.pulls[mode] += 1
        self.reply_density.observe(density)

    def count(
        self, rpc: str, answered: int = 0, received_bytes: int = 0, sent_bytes: int = 0, dense_bytes: int = 0
    ) -> None:
        """Add to the counts of a kind of call."""
        traffic = self.traffic[rpc]
        with self._lock:
            traffic.answered += answered
            traffic.received_bytes += received_bytes
            traffic.sent_bytes += sent_bytes
            traffic.dense_bytes += dense_bytes

    def _of_traffic(self, counted: str) -> dict[str, int]:
        return {rpc: getattr(traffic, counted) for rpc, traffic in self.traffic.items()}

"""Metrics that every request changes: plain numbers, which become Prometheus's metrics when they are read.

The library's own counters and histograms cost a request about a hundred calls of Python functions.
"""

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


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

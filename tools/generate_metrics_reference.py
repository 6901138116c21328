"""Writes docs/reference/metrics.md from what psservice/observability/metrics.py declares; ``--check`` only compares.

Run it after changing a metric: ``make references``.
"""

import sys
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric

from psservice.observability.metrics import Metrics, ReadMetric, RequestHistogram
from tools.generated import keep

TARGET = Path(__file__).parent.parent / "docs" / "reference" / "metrics.md"

HEAD = """# Metrics

Generated from `psservice/observability/metrics.py` by `tools/generate_metrics_reference.py`.

Each shard serves these at `/metrics` of its `--metrics-listen`, in the text format of Prometheus. Times of
day are Unix seconds, and counters start at 0 with the process. A histogram `NAME` is exposed as `NAME_bucket`,
`NAME_sum` and `NAME_count`. Only `psservice_shard_info` has the run and the shard as labels; join it by instance:

```
rate(psservice_pushes_total[5m]) * on (job, instance) group_left (run, shard) psservice_shard_info
```

Alerts and their runbook: [alerts](../operate/alerts.md).

The number of series is bounded, because no label has a value that callers choose, but for those of the one series
`psservice_shard_info`. No worker has a series: its figures are in [the status](../operate/running.md). The values of

* `rpc` are the calls of the protocol;
* `reason` and `why` are the [reasons](protocol.md#refusals) of refusals, and a few words of this program;
* `mode` is `exact` or `topk`;
* `of_shard` is a shard that this one knows of, as many as the run has;
* `certificate` are the settings that name a certificate.

Bounds of histograms go from small models to 1 G parameters on slow lines: bytes from 1 KiB to 4 GiB, seconds from
0.1 ms to 100 s (of calls, to 3,000 s), densities from 0.01 % to all.

| name | kind | labels | meaning |
|---|---|---|---|
"""


def exposed_name(metric: Metric) -> str:
    """Return the name under which a metric is queried; of a histogram, what its series begin with."""
    return metric.name + {"counter": "_total", "info": "_info"}.get(metric.type, "")


def declared_labels(metrics: Metrics) -> dict[str, tuple[str, ...]]:
    """Return the labels of each metric that has any, but a histogram's ``le``; by the metric's name in the library."""
    found = {}
    for declared in [*vars(metrics).values(), *metrics.read]:
        if isinstance(declared, Counter | Gauge | Histogram):
            found[declared._name] = tuple(declared._labelnames)
        elif isinstance(declared, RequestHistogram):
            found[declared.name] = declared.labels
        elif isinstance(declared, ReadMetric):
            (metric,) = declared.collect()
            found[metric.name] = tuple(metric.samples[0].labels)
    return found


def table() -> str:
    """Return a Markdown table of all metrics, by name; those of the process itself last."""
    declared = Metrics()
    labels_of = declared_labels(declared)
    metrics = sorted(declared.registry.collect(), key=lambda metric: (metric.name.startswith("process_"), metric.name))
    rows = []
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in labels_of.get(metric.name, ())) or "–"
        kind = "gauge" if metric.type == "info" else metric.type
        rows.append(f"| `{exposed_name(metric)}` | {kind} | {labels} | {metric.documentation.rstrip('.')} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    """Write or compare; return 1 where the page is out of date."""
    return keep(TARGET, HEAD + table())


if __name__ == "__main__":
    sys.exit(main())

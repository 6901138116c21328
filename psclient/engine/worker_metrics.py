"""Prometheus metrics of one worker, on a port of its own, if it was asked for: nothing listens otherwise."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from psclient.errors import ConfigurationError
from psclient.report import PHASES, StepReport, Totals

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

log = logging.getLogger("psclient")

_STEP_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_TOTALS = {
    "push_bytes": "Message bytes sent in pushes",
    "pull_bytes": "Message bytes received in pulls",
    "buffer_bytes": "Message bytes of exchanges of buffers, both ways",
    "upload_bytes": "Message bytes of whole models that were uploaded",
    "samples": "Samples that the pushed gradients came from",
    "refused": "Parts of pushes that went back into the residual",
}


class WorkerMetrics:
    """Serves the metrics of one worker at an address, from now until :meth:`close`.

    Each has the labels ``run`` and ``worker``, of one value each in a process. The seconds of a step are told by
    :meth:`observe`; the rest is read from ``totals`` when Prometheus asks, in a thread that holds no lock.

    Args:
        address: ``HOST:PORT``; port 0 for any, which the log names.
        worker: the worker's name.
        totals: of the worker, which go on growing.
        elements: of the model.

    Raises:
        ConfigurationError: prometheus-client is not installed, the address is none, or another program listens there.
    """

    def __init__(self, address: str, worker: str, totals: Totals, elements: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, Histogram, start_http_server
        except ImportError as error:
            raise ConfigurationError(
                "PSCLIENT_METRICS_LISTEN needs prometheus-client: pip install 'sparseps[server]', or leave the setting "
                "out"
            ) from error
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigurationError(f"PSCLIENT_METRICS_LISTEN={address!r} is not HOST:PORT, as 127.0.0.1:9465 is")
        self._worker, self._run = worker, ""
        self._totals, self._elements = totals, elements
        self._last: StepReport | None = None
        self._phases = dict.fromkeys(PHASES, 0.0)
        self._steps = 0
        registry = CollectorRegistry()
        self._step_seconds = Histogram(
            "psclient_step_seconds",
            "Time of a step in the optimizer: selecting, sending, waiting, applying; without the model's computation",
            ["run", "worker"],
            buckets=_STEP_BUCKETS,
            registry=registry,
        )
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {address} (PSCLIENT_METRICS_LISTEN): {error}; workers of one machine need a port "
                "each, or 0 for any"
            ) from error
        self.address = f"{host}:{self._server.server_port}"
        self._is_closed = False
        log.info("worker %s has metrics at http://%s/metrics", worker, self.address)

    def observe(self, report: StepReport, run: str) -> None:
        """Count a step that has ended, of this run; on the worker's thread."""
        self._run, self._last = run, report
        self._steps += 1
        for phase, seconds in report.seconds.items():
            self._phases[phase] += seconds
        self._step_seconds.labels(run=run, worker=self._worker).observe(sum(report.seconds.values()))

    def collect(self) -> "Iterable[Metric]":
        """Read the totals, and the figures of the last step."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        labels, names = [self._run, self._worker], ["run", "worker"]

        def one(family: Any, name: str, documentation: str, value: float) -> "Metric":
            made: Metric = family(f"psclient_{name}", documentation, labels=names)
            made.add_metric(labels, value)  # type: ignore[attr-defined]  # of each kind of family
            return made

        last = self._last
        if last is None:  # no run has a name before the first step
            return
        yield one(
            CounterMetricFamily,
            "steps",
            "Steps that have ended, each a push and its reply",
            self._steps,
        )
        for name, documentation in _TOTALS.items():
            yield one(CounterMetricFamily, name, documentation, getattr(self._totals, name))
        phases = CounterMetricFamily(
            "psclient_phase_seconds", "Time of steps by phase, as in StepReport.seconds", labels=[*names, "phase"]
        )
        for phase, seconds in self._phases.items():
            phases.add_metric([*labels, phase], seconds)
        yield phases
        yield one(GaugeMetricFamily, "staleness", "Staleness of the last push, on the worst shard", last.staleness)
        yield one(GaugeMetricFamily, "version", "Version of shard 0 after the last step", last.version)
        density = last.push_entries / max(1, self._elements)
        yield one(GaugeMetricFamily, "push_density", "Entries of the last push, over the model's elements", density)

    def close(self) -> None:
        """Free the port. Harmless twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

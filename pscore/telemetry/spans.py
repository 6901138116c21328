"""Spans of OpenTelemetry; only :func:`pscore.telemetry.tracing.start` imports this module."""

import atexit
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pscore.telemetry.span import NO_SPAN, TRACEPARENT, Result, TraceSpan, TracingError
from pscore.version import __version__

Attributes = Mapping[str, str | int | float]

_EXPORTERS = "opentelemetry_traces_exporter"
"""The entry points under which installed packages offer exporters."""

_LAST_SECONDS = 5.0
"""Time for the last spans at a process's end; OpenTelemetry's is 30 s if a collector does not answer."""

_PROPAGATOR = TraceContextTextMapPropagator()


class Spans:
    """Makes and exports the spans of this process; see :mod:`pscore.telemetry.tracing`.

    The provider is our own, beside a program's global one; a span that is current there is a parent all the same.

    Raises:
        TracingError: there is no such exporter, or it cannot be made.
    """

    def __init__(self, service: str, instance: str) -> None:
        described = {"service.instance.id": instance}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            described["service.name"] = service
        exporter = _exporter(os.environ.get("OTEL_TRACES_EXPORTER", "otlp"))
        self._provider = TracerProvider(resource=Resource.create(described), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("sparseps", __version__)
        atexit.register(self.close)

    def close(self) -> None:
        """Export the remaining spans; the end of a process does not wait long for a collector."""
        atexit.unregister(self.close)
        ending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        ending.start()
        ending.join(_LAST_SECONDS)

    def begin(self, name: str, attributes: Attributes, *, root: bool = False) -> TraceSpan:
        """Begin a span below the current one; without one, only a root."""
        if not root and not trace.get_current_span().is_recording():
            return NO_SPAN
        kind = SpanKind.CLIENT if name in ("push", "pull") else SpanKind.INTERNAL
        return _open(self._tracer.start_span(name, kind=kind, attributes=_named(attributes)))

    @contextmanager
    def body(self, name: str, attributes: Attributes) -> Iterator[TraceSpan]:
        """Let the body be a span."""
        opened = self.begin(name, attributes)
        with opened.active():
            try:
                yield opened
            except BaseException as error:
                opened.end(type(error).__name__)
                raise
            finally:
                opened.end()

    def continued(self, name: str, traceparent: str) -> TraceSpan:
        """Begin a server's span below a caller's."""
        parent = _PROPAGATOR.extract({TRACEPARENT: traceparent}, contexts.Context())
        if not trace.get_current_span(parent).get_span_context().is_valid:
            return NO_SPAN
        described = {"rpc.system": "grpc", "rpc.method": name}
        return _open(self._tracer.start_span(name, parent, SpanKind.SERVER, described))


class _OpenSpan(TraceSpan):
    def __init__(self, opened: trace.Span) -> None:
        self._span = opened
        self._context = trace.set_span_in_context(opened)

    @property
    def parent(self) -> str:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, self._context)  # the rest of a trace's baggage is not for the servers
        return carrier[TRACEPARENT]

    @contextmanager
    def active(self) -> Iterator[None]:
        token = contexts.attach(self._context)
        try:
            yield
        finally:
            contexts.detach(token)

    def run(self, function: Callable[..., Result], *arguments: object) -> Result:
        with self.active():
            return function(*arguments)

    def note(self, **attributes: str | int | float) -> None:
        self._span.set_attributes(_named(attributes))

    def end(self, error: str = "") -> None:
        if self._span.is_recording():
            if error:
                self._span.set_status(Status(StatusCode.ERROR, error))
            self._span.end()


def _open(opened: trace.Span) -> TraceSpan:
    """Return a span that does nothing if this trace is not sampled."""
    return _OpenSpan(opened) if opened.is_recording() else NO_SPAN


def _named(attributes: Attributes) -> dict[str, Any]:
    return {f"sparseps.{name}": value for name, value in attributes.items()}


def _exporter(name: str) -> SpanExporter:
    """Make the exporter that ``OTEL_TRACES_EXPORTER`` names: OTLP over gRPC, or one of an installed package."""
    try:
        if name in ("otlp", "otlp_proto_grpc"):
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            return OTLPSpanExporter()
        offered = {point.name: point for point in entry_points(group=_EXPORTERS)}
        if name not in offered:
            raise TracingError(f"OTEL_TRACES_EXPORTER={name}: use one of otlp, {', '.join(sorted(offered))}")
        made: SpanExporter = offered[name].load()()
    except (ValueError, OSError) as error:
        message = f"the exporter {name} of traces cannot be made, check the OTEL_ variables: {error}"
        raise TracingError(message) from error
    return made

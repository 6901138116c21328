"""A collector of traces on loopback: what OTLP exporters of real processes send, kept in memory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc


@dataclass(frozen=True)
class Found:
    """One span."""

    service: str
    instance: str
    name: str
    trace: str
    span: str
    parent: str
    attributes: dict[str, str | int | float]
    error: str


class Collector(pb_grpc.TraceServiceServicer):
    """Keeps every span that is exported to :attr:`address`."""

    def __init__(self):
        self._lock, self._spans, self.received = threading.Lock(), [], []
        self._server = grpc.server(ThreadPoolExecutor(4))
        pb_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    @property
    def environment(self):
        """What lets a process export here, soon."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{self.address}",
            "OTEL_EXPORTER_OTLP_INSECURE": "true",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def Export(self, request, context):  # noqa: N802
        with self._lock:
            self.received.append(request.SerializeToString())
            for resource in request.resource_spans:
                described = _plain(resource.resource.attributes)
                for scope in resource.scope_spans:
                    self._spans += [_found(described, span) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    @property
    def spans(self):
        with self._lock:
            return list(self._spans)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.stop(None).wait()


def _plain(attributes):
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


def _found(described, span):
    return Found(
        described["service.name"],
        described["service.instance.id"],
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        _plain(span.attributes),
        span.status.message,
    )

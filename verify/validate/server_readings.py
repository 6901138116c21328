"""What a running server says of itself: its version, its metrics, and whether it should be started anew."""

import urllib.request
from contextlib import closing

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pscore.net.proxies import NO_PROXY
from pscore.wire.v1 import parameter_server_pb2 as pb
from verify.client.wire import Line

_CALL_SECONDS = 30.0
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
_SECONDS = 5.0


def status(address: str) -> pb.GetStatusResponse:
    with closing(Line(address)) as line:
        return line.stub.GetStatus(pb.GetStatusRequest(), timeout=_CALL_SECONDS)


def metric(address: str, name: str) -> float:
    """Read a metric without labels from the metrics port."""
    with _OPENER.open(f"http://{address}/metrics", timeout=_SECONDS) as reply:
        for line in reply.read().decode().splitlines():
            found, _, value = line.partition(" ")
            if found == name:
                return float(value)
    raise KeyError(name)


def wants_restart(address: str) -> bool:
    """Whether the health port says what Kubernetes restarts a pod for."""
    with grpc.insecure_channel(address, NO_PROXY) as channel:
        request = health_pb2.HealthCheckRequest(service="liveness")
        stub = health_pb2_grpc.HealthStub(channel)
        status = stub.Check(request, timeout=_SECONDS).status  # type: ignore[attr-defined]  # made at run time
    return bool(status == health_pb2.HealthCheckResponse.NOT_SERVING)

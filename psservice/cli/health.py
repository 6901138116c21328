"""``psservice health``: ask a server's plaintext health port, as a container's health check does."""

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


class UnhealthyError(Exception):
    """The server does not serve, or cannot be asked; the message has its address and why."""


def check(address: str, timeout_seconds: float) -> None:
    """Return if the server at ``HOST:PORT`` of its ``--health-listen`` is serving.

    Raises:
        UnhealthyError: it is starting, draining, cannot write its journal, or gives no answer in time.
    """
    # Without the proxy of the environment, through which gRPC would go to loopback too.
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(  # type: ignore[attr-defined]  # made at run time
                health_pb2.HealthCheckRequest(), timeout=timeout_seconds, wait_for_ready=False
            )
        except grpc.RpcError as error:
            raise UnhealthyError(
                f"{address}: {error.code().name}: {error.details()}; "
                f"is a server running with --health-listen {address}?"
            ) from error
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise UnhealthyError(
            f"{address}: {name}; the server is starting, drained or stopping, or cannot write its journal: see its log"
        )

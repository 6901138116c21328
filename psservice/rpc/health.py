"""gRPC's health service behind time limits: open to everybody, so a caller costs a little memory for a short time."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

LIVENESS = "liveness"
"""The name for "no restart is needed": not whether it serves. Kubernetes restarts a pod by it."""

_REQUEST_SECONDS = 5.0
_WATCH_SECONDS = 3600.0
_MOST_CALLS = 256
"""Open at once on a port; beyond it the oldest ends."""


class Health:
    """The states that are told, and the handler of those who ask. One for all ports of a process.

    Args:
        loop: the event loop of the ports.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tell nothing yet."""
        self._loop = loop
        self._servicer = health.aio.HealthServicer()

    def set(self, name: str, *, serving: bool) -> None:
        """Set a state, from any thread but the loop's; it is told when this returns."""
        state = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
        asyncio.run_coroutine_threadsafe(self._servicer.set(name, state), self._loop).result()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return what a gRPC server is given; each port counts its own callers."""
        methods: dict[str, Callable[..., Any]] = {"Check": self._check, "Watch": self._watch}
        places: dict[asyncio.Timeout, None] = {}
        return grpc.method_handlers_generic_handler(
            health.SERVICE_NAME,
            {
                name: grpc.stream_stream_rpc_method_handler(
                    _bounded(serve, places), response_serializer=HealthCheckResponse.SerializeToString
                )
                for name, serve in methods.items()
            },
        )

    async def _check(self, request: HealthCheckRequest, context: Any) -> None:
        await context.write(await self._servicer.Check(request, context))

    async def _watch(self, request: HealthCheckRequest, context: Any) -> None:
        await self._servicer.Watch(request, context)


def _bounded(serve: Callable[..., Any], places: dict[asyncio.Timeout, None]) -> Callable[..., Any]:
    async def bounded(_: Any, context: Any) -> None:
        try:
            async with asyncio.timeout(_REQUEST_SECONDS) as limit:
                if len(places) >= _MOST_CALLS:
                    _give_way(places)
                places[limit] = None
                try:
                    raw = await context.read()
                    request = HealthCheckRequest.FromString(b"" if raw is grpc.aio.EOF else raw)
                    if limit in places and not limit.expired():
                        limit.reschedule(asyncio.get_running_loop().time() + _WATCH_SECONDS)
                    await serve(request, context)
                finally:
                    places.pop(limit, None)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "a health check is open for too long")
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no HealthCheckRequest")

    return bounded


def _give_way(places: dict[asyncio.Timeout, None]) -> None:
    """End the oldest call: a probe takes a moment, and must not wait for those who stay."""
    oldest = next(iter(places))
    del places[oldest]
    if not oldest.expired():
        oldest.reschedule(0)

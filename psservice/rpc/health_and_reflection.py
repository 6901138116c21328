"""gRPC's own services, health and reflection, behind time limits."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha import reflection, reflection_pb2

from pscore.wire.errors import Rejected, to_status
from psservice.rpc.auth import Authenticator, Role

LIVENESS = "liveness"
"""The name for "no restart is needed": not whether the server serves. Kubernetes restarts a pod by it."""

_REQUEST_SECONDS = 5.0
_WATCH_SECONDS = 3600.0
_MOST_CALLS = 256  # open at once on a port; beyond that the oldest ends

_V1ALPHA = reflection.SERVICE_NAME
_V1 = _V1ALPHA.replace("v1alpha", "v1")
_REFLECTION_SECONDS = 60.0
_REFLECTION_RPC = "ServerReflectionInfo"


class Health:
    """The states of one process, for all ports of its event loop. Everybody may ask."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()
        self._telling: set[asyncio.Task[None]] = set()

    def set(self, name: str, *, serving: bool) -> None:
        """Set a state, and tell watchers soon after; on the event loop."""
        state = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
        task = asyncio.ensure_future(self._servicer.set(name, state))
        self._telling.add(task)  # the loop keeps no reference
        task.add_done_callback(self._telling.discard)

    def handler(self) -> grpc.GenericRpcHandler:
        """Return a handler for one port; each port counts its own callers."""
        open_calls: dict[asyncio.Timeout, None] = {}
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            rpc: grpc.stream_stream_rpc_method_handler(
                partial(self._serve, rpc == "Watch", open_calls),
                response_serializer=HealthCheckResponse.SerializeToString,
            )
            for rpc in ("Check", "Watch")
        }
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods)

    async def _serve(self, watches: bool, open_calls: dict[asyncio.Timeout, None], _: Any, context: Any) -> None:
        try:
            async with asyncio.timeout(_REQUEST_SECONDS) as limit:
                if len(open_calls) >= _MOST_CALLS:  # a probe is short, and must not wait for calls that stay
                    oldest = next(iter(open_calls))
                    del open_calls[oldest]
                    if not oldest.expired():
                        oldest.reschedule(0)
                open_calls[limit] = None
                try:
                    raw = await context.read()
                    request = HealthCheckRequest.FromString(b"" if raw is grpc.aio.EOF else raw)
                    if limit in open_calls and not limit.expired():
                        limit.reschedule(asyncio.get_running_loop().time() + _WATCH_SECONDS)
                    if watches:
                        await self._servicer.Watch(request, context)
                    else:
                        await context.write(await self._servicer.Check(request, context))
                finally:
                    open_calls.pop(limit, None)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "a health check is open for too long")
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no HealthCheckRequest")


def reflection_handlers(services: Sequence[str], authenticator: Authenticator) -> list[grpc.GenericRpcHandler]:
    """Return handlers of v1 and v1alpha, which have the same messages, for callers with the role of a reader.

    ``services`` are the full names of the services to describe, beside reflection itself.
    """
    _describe_v1()
    servicer = reflection.aio.ReflectionServicer((*services, _V1, _V1ALPHA))

    async def requests(context: Any) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        while (raw := await context.read()) is not grpc.aio.EOF:
            yield reflection_pb2.ServerReflectionRequest.FromString(raw)

    async def serve(_: Any, context: Any) -> None:
        try:
            await authenticator.admit(context.invocation_metadata(), _REFLECTION_RPC, Role.READER)
            async with asyncio.timeout(_REFLECTION_SECONDS):
                async for response in servicer.ServerReflectionInfo(requests(context), context):  # type: ignore[attr-defined]
                    await context.write(response.SerializeToString())
        except Rejected as refusal:
            await context.abort_with_status(to_status(refusal))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"reflection ends after {_REFLECTION_SECONDS:.0f} s")
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no ServerReflectionRequest")

    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        _REFLECTION_RPC: grpc.stream_stream_rpc_method_handler(serve)
    }
    return [grpc.method_handlers_generic_handler(name, methods) for name in (_V1, _V1ALPHA)]


def _describe_v1() -> None:
    """Add v1's descriptor to the default pool: v1alpha's under another package."""
    v1 = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(v1)
    v1.name, v1.package = "grpc/reflection/v1/reflection.proto", "grpc.reflection.v1"
    for message in v1.message_type:
        for field in filter(lambda each: each.type_name, message.field):
            field.type_name = field.type_name.replace(".v1alpha.", ".v1.")
    for method in v1.service[0].method:
        method.input_type = method.input_type.replace(".v1alpha.", ".v1.")
        method.output_type = method.output_type.replace(".v1alpha.", ".v1.")
    descriptor_pool.Default().AddSerializedFile(v1.SerializeToString())

"""gRPC's own services, health and reflection, behind time limits."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from psservice.rpc.audit import AuditTrail
from psservice.rpc.auth import Authenticator
from psservice.rpc.caller import Role
from psservice.rpc.ports import OPTIONS

LIVENESS = "liveness"
"""The name for "no restart is needed": not whether the server serves. Kubernetes restarts a pod by it."""

_REQUEST_SECONDS = 5.0
_WATCH_SECONDS = 3600.0
_MOST_CALLS = 256  # open at once on a port; beyond that the oldest ends
_SPARE_THREADS = 16  # for calls that come while the oldest end
_SWEEP_SECONDS = 0.5
_NO_REQUEST = "this is no HealthCheckRequest"

_V1ALPHA = reflection.SERVICE_NAME
_V1 = _V1ALPHA.replace("v1alpha", "v1")
_REFLECTION_SECONDS = 60.0
_REFLECTION_RPC = "ServerReflectionInfo"


class Health:
    """The states of one process: answered on a port of their own by threads that do nothing else. Everybody may ask.

    So an answer waits for no event loop, no disk and no shard.
    """

    def __init__(self) -> None:
        self._servicer = health.HealthServicer()
        self._open_calls: dict[grpc.ServicerContext, float] = {}  # and when each is cancelled, in monotonic seconds
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._server: grpc.Server | None = None

    def set(self, name: str, *, serving: bool) -> None:
        """Set a state and tell watchers; any thread may call this, under any lock."""
        self._servicer.set(name, HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING)

    def open_port(self, address: str) -> int:
        """Answer at ``HOST:PORT`` in plaintext; return the port's number. Raises ``RuntimeError`` if it is taken."""
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            rpc: grpc.stream_stream_rpc_method_handler(
                partial(self._serve, rpc == "Watch"), response_serializer=HealthCheckResponse.SerializeToString
            )
            for rpc in ("Check", "Watch")
        }
        handler = grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods)
        threads = ThreadPoolExecutor(_MOST_CALLS + _SPARE_THREADS, "health")
        server = grpc.server(threads, [handler], options=OPTIONS)
        number = server.add_insecure_port(address)
        server.start()
        self._server = server
        threading.Thread(target=self._cancel_late, name="health-limits", daemon=True).start()
        return number

    def close(self) -> None:
        """Close the port."""
        self._stopping.set()
        if self._server is not None:
            self._server.stop(0.0).wait()

    def _serve(
        self, watches: bool, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[HealthCheckResponse]:
        with self._lock:
            oldest = next(iter(self._open_calls)) if len(self._open_calls) >= _MOST_CALLS else None
            if oldest is not None:  # a probe is short, and must not wait for calls that stay
                del self._open_calls[oldest]
            self._open_calls[context] = time.monotonic() + _REQUEST_SECONDS
        if oldest is not None:
            oldest.cancel()
        try:
            request = HealthCheckRequest.FromString(next(requests, b""))
            with self._lock:
                if context in self._open_calls:
                    self._open_calls[context] = time.monotonic() + _WATCH_SECONDS
            if watches:
                yield from self._servicer.Watch(request, context)
            else:
                yield self._servicer.Check(request, context)
        except DecodeError:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, _NO_REQUEST)
        finally:
            with self._lock:
                self._open_calls.pop(context, None)

    def _cancel_late(self) -> None:
        while not self._stopping.wait(_SWEEP_SECONDS):
            now = time.monotonic()
            with self._lock:
                late = [context for context, end in self._open_calls.items() if end < now]
            for context in late:
                context.cancel()

    def check_handler(self) -> grpc.GenericRpcHandler:
        """Return a handler of ``Check`` alone for the workers' port, whose event loop answers there."""
        open_calls = 0

        async def check(_: Any, context: Any) -> None:
            nonlocal open_calls
            if open_calls >= _MOST_CALLS:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_MOST_CALLS} health checks are open")
            open_calls += 1
            try:
                async with asyncio.timeout(_REQUEST_SECONDS):
                    raw = await context.read()
                    request = HealthCheckRequest.FromString(b"" if raw is grpc.aio.EOF else raw)
                    await context.write(self._servicer.Check(request, context).SerializeToString())
            except TimeoutError:
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "a health check is open for too long")
            except DecodeError:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _NO_REQUEST)
            finally:
                open_calls -= 1

        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {"Check": grpc.stream_stream_rpc_method_handler(check)}
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods)


def reflection_handlers(
    services: Sequence[str], authenticator: Authenticator, audit: AuditTrail
) -> list[grpc.GenericRpcHandler]:
    """Return handlers of v1 and v1alpha, which have the same messages, for callers with the role of a reader.

    ``services`` are the full names of the services to describe, beside reflection itself.
    """
    _describe_v1()
    servicer = reflection.aio.ReflectionServicer((*services, _V1, _V1ALPHA))

    async def requests(context: Any) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        while (raw := await context.read()) is not grpc.aio.EOF:
            yield reflection_pb2.ServerReflectionRequest.FromString(raw)

    async def serve(_: Any, context: Any) -> None:
        credentials = authenticator.credentials_of(context)
        try:
            await authenticator.admit(credentials, _REFLECTION_RPC, Role.READER)
            async with asyncio.timeout(_REFLECTION_SECONDS):
                async for response in servicer.ServerReflectionInfo(requests(context), context):  # type: ignore[attr-defined]
                    await context.write(response.SerializeToString())
        except Rejected as refusal:
            audit.refused(_REFLECTION_RPC, context, credentials, refusal)
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

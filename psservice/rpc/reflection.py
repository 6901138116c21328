"""gRPC reflection, as v1 and v1alpha, which have the same messages; behind the gate and a time limit."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection, reflection_pb2

from pscore.wire.errors import Rejected, to_status
from psservice.rpc.auth import Authenticator, Role

_V1ALPHA = reflection.SERVICE_NAME
_V1 = _V1ALPHA.replace("v1alpha", "v1")
_SECONDS = 60.0
_RPC = "ServerReflectionInfo"


def handlers(services: Sequence[str], gate: Authenticator) -> tuple[grpc.GenericRpcHandler, ...]:
    """Return what a gRPC server is given, to describe these services and itself.

    Args:
        services: full names.
        gate: asks for the role of a reader.
    """
    _describe_v1()
    servicer = reflection.aio.ReflectionServicer((*services, _V1, _V1ALPHA))

    async def requests(context: Any) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        while (raw := await context.read()) is not grpc.aio.EOF:
            yield reflection_pb2.ServerReflectionRequest.FromString(raw)

    async def serve(_: Any, context: Any) -> None:
        try:
            gate.admit(context.invocation_metadata(), _RPC, Role.READER)
            async with asyncio.timeout(_SECONDS):
                async for response in servicer.ServerReflectionInfo(requests(context), context):  # type: ignore[attr-defined]
                    await context.write(response.SerializeToString())
        except Rejected as refusal:
            await context.abort_with_status(to_status(refusal))
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"reflection ends after {_SECONDS:.0f} s")
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no ServerReflectionRequest")

    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {_RPC: grpc.stream_stream_rpc_method_handler(serve)}
    return tuple(grpc.method_handlers_generic_handler(name, methods) for name in (_V1, _V1ALPHA))


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

"""A server's part of its callers' traces; a call that brings no trace leaves none."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grpc

from pscore import tracing
from pscore.tracing import TRACEPARENT, TraceSpan

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Found: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class TracedCalls(grpc.ServerInterceptor):
    """Makes each call that brings a ``traceparent`` a span below the caller's."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Found],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Found:
        """Wrap the method's handler."""
        handler = continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        parent = metadata.get(TRACEPARENT)
        if handler is None or not isinstance(parent, str):
            return handler
        rpc = handler_call_details.method.rpartition("/")[2]
        if handler.response_streaming:
            stream = handler.stream_stream or handler.unary_stream
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            return make(_streaming(stream, rpc, parent), handler.request_deserializer, handler.response_serializer)
        answer = handler.stream_unary or handler.unary_unary
        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(_unary(answer, rpc, parent), handler.request_deserializer, handler.response_serializer)


def _unary(inner: Any, rpc: str, parent: str) -> Callable[..., Any]:
    def serve(request: Any, context: grpc.ServicerContext) -> Any:
        call = tracing.continued(rpc, parent)
        try:
            return call.run(inner, request, context)
        finally:
            _end(call, context)

    return serve


def _streaming(inner: Any, rpc: str, parent: str) -> Callable[..., Any]:
    def serve(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        call = tracing.continued(rpc, parent)
        responses = inner(request, context)
        try:
            while (response := call.run(next, responses, None)) is not None:
                yield response
        finally:
            responses.close()
            _end(call, context)

    return serve


def _end(call: TraceSpan, context: grpc.ServicerContext) -> None:
    """End a call's span with its status; gRPC knows of none where the answer was given."""
    status = context.code()  # type: ignore[attr-defined]
    name = status.name if isinstance(status, grpc.StatusCode) else "OK"
    call.note(status=name)
    call.end("" if name == "OK" else name)

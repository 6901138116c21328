"""The watchdog: no call holds a thread for ever because its client stalls.

A call waits for its client in two places: for a message that is due, and until an answer that was written is taken. The
time spent there is limited, for one message (*idle*) and, once a call is older than a limit, at all. A thread cancels
the calls beyond it: the handler ends as it does when a client goes away, and what was received is dropped.

Every method is served as a client stream, the unary ones too: gRPC would else wait for their message in a place that
nothing here can see.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health

from psservice.metrics import Metrics

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Found: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"

_OFTEN, _SELDOM = 0.02, 1.0
"""Between two looks at all calls, seconds: an eighth of the shorter limit, within these."""


class Watched:
    """One call, and since when it waits for its client."""

    def __init__(self, context: grpc.ServicerContext, rpc: str, now: float) -> None:
        """Begin at work."""
        self.context, self.rpc, self.started = context, rpc, now
        self.waiting_for = ""
        self.waiting_since = now


class Watchdog:
    """Cancels calls whose client stalls.

    Args:
        idle_seconds: how long a call may wait for one message, either way.
        call_seconds: age from which a call may not wait any more.
        metrics: told of each call that is cut.
        clock: monotonic seconds.
    """

    def __init__(
        self, idle_seconds: float, call_seconds: float, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start to look."""
        self._idle_seconds, self._call_seconds, self._metrics, self._clock = idle_seconds, call_seconds, metrics, clock
        self._calls: set[Watched] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="watchdog", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Calls that are being served."""
        return len(self._calls)

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    @contextmanager
    def watch(self, context: grpc.ServicerContext, rpc: str) -> Iterator[Watched]:
        """Watch a call for the length of the body."""
        call = Watched(context, rpc, self._clock())
        with self._lock:
            self._calls.add(call)
        try:
            yield call
        finally:
            with self._lock:
                self._calls.discard(call)
            self._metrics.call_seconds.labels(rpc=rpc).observe(self._clock() - call.started)

    @contextmanager
    def waiting(self, call: Watched, what: str) -> Iterator[None]:
        """Note that a call waits for its client in the body."""
        call.waiting_since, call.waiting_for = self._clock(), what
        try:
            yield
        finally:
            call.waiting_for = ""

    def requests(self, call: Watched, requests: Iterator[Any]) -> Iterator[Any]:
        """Pass requests on, and watch the waiting for each."""
        while True:
            with self.waiting(call, "request"):
                request = next(requests, None)
            if request is None:
                return
            yield request

    def responses(self, call: Watched, responses: Iterator[Any]) -> Iterator[Any]:
        """Pass responses on, and watch the waiting until each is taken."""
        for response in responses:
            with self.waiting(call, "reader"):
                yield response

    def look(self) -> None:
        """Cancel the calls that have waited for too long."""
        now = self._clock()
        with self._lock:  # held while cancelling, so that no call ends meanwhile
            for call in list(self._calls):
                waiting_for = call.waiting_for
                if not waiting_for:
                    continue
                if now - call.waiting_since > self._idle_seconds:
                    self._cut(call, f"idle_{waiting_for}")
                elif now - call.started > self._call_seconds:
                    self._cut(call, "too_long")

    def _cut(self, call: Watched, why: str) -> None:
        self._calls.discard(call)
        self._metrics.calls_cut.labels(rpc=call.rpc, why=why).inc()
        call.context.cancel()

    def _work(self) -> None:
        period = min(max(min(self._idle_seconds, self._call_seconds) / 8, _OFTEN), _SELDOM)
        while not self._stop.wait(period):
            self.look()


class WatchedCalls(grpc.ServerInterceptor):
    """Puts every call of a server before a watchdog, but those of the health service, which wait by design."""

    def __init__(self, watchdog: Watchdog) -> None:
        """Watch with this one."""
        self._watchdog = watchdog

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Found],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Found:
        """Wrap the method's handler."""
        handler = continuation(handler_call_details)
        service, _, rpc = handler_call_details.method.strip("/").partition("/")
        if handler is None or service == health.SERVICE_NAME:
            return handler
        if handler.response_streaming:
            make, serve = grpc.stream_stream_rpc_method_handler, self._streaming(handler, rpc)
        else:
            make, serve = grpc.stream_unary_rpc_method_handler, self._unary(handler, rpc)
        return make(serve, handler.request_deserializer, handler.response_serializer)

    def _unary(self, handler: Handler, rpc: str) -> Callable[..., Any]:
        inner: Callable[..., Any] = handler.stream_unary or handler.unary_unary  # type: ignore[assignment]

        def serve(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            with self._watchdog.watch(context, rpc) as call:
                return inner(self._argument(handler, call, requests), context)

        return serve

    def _streaming(self, handler: Handler, rpc: str) -> Callable[..., Any]:
        inner: Callable[..., Any] = handler.stream_stream or handler.unary_stream  # type: ignore[assignment]

        def serve(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            with (
                self._watchdog.watch(context, rpc) as call,
                closing(inner(self._argument(handler, call, requests), context)) as responses,
            ):
                yield from self._watchdog.responses(call, responses)

        return serve

    def _argument(self, handler: Handler, call: Watched, requests: Iterator[Any]) -> Any:
        """Return what the handler takes: the watched stream, or its only message."""
        watched = self._watchdog.requests(call, requests)
        if handler.request_streaming:
            return watched
        request = next(watched, None)
        if request is None:
            call.context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{call.rpc} takes exactly one message")
        return request

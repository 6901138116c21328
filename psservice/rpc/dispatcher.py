"""Every call's headers, time and threads, on one event loop; handlers know the meaning of calls.

A caller is known by its headers before a message of its call is read, and a call occupies no thread while it waits for
its client: threads work on messages that have arrived. Messages are read as raw bytes and parsed here, since a
deserialiser that fails inside gRPC leaks its input.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from pscore.telemetry import tracing
from pscore.telemetry.span import TRACEPARENT
from pscore.wire.errors import ErrorCode, Rejected, to_status
from pscore.wire.messages import SHARD_HEADER
from psservice.apply_thread import ApplyThread
from psservice.observability.metrics import Metrics
from psservice.rpc.auth import Authenticator
from psservice.rpc.calls import (
    RULES,
    SERVICE,
    Answer,
    Call,
    Handler,
    Lane,
    NotYetError,
    Rule,
    StreamReader,
    require_place,
)
from psservice.rpc.memory_budget import MemoryBudget, received_bytes
from psservice.rpc.penalty import Penalty, is_fault
from psservice.rpc.work import Answers, feed, reply_to
from psservice.settings import ServerSettings
from psservice.types import Identity

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_SMALL_BYTES = 16 << 10  # of a message of a push that is little work
_LANE_THREADS = {Lane.LEASE: 2, Lane.JOIN: 2, Lane.OPERATOR: 4}
_FIRST_PIECES = 4  # of work of each kind, which threads do: they may wait for a compiler
_MOST_CALLS = 4096
_MOST_SILENT = 256  # calls without a message; beyond that the oldest is cut
_MOST_JOINS = 16  # whose message is received at once, since it may be of megabytes
_REQUEST_SECONDS = 10.0  # for the message of a call that has one
_REQUEST_BYTES = 64 << 20  # of calls of one message, until their first answers are made
_STOP_SECONDS = 2.0  # for calls that wait for their client, from the moment the server stops
_STOP_POLL_SECONDS = 0.02


class _StalledError(Exception):
    """The client has stalled a call for too long, or the server stops."""


_Message: TypeAlias = tuple[bytes | None, int]  # of a stream, ``None`` at its end; and when it arrived, nanoseconds


@dataclass(slots=True, eq=False)
class _OpenCall:
    """The event loop's side of a call."""

    call: Call  # the request that is being served, or was served last
    context: Any
    rule: Rule
    started: float
    timeout: asyncio.Timeout | None = None
    why: str = ""
    is_answered: bool = False  # the last message is on its way
    is_idle: bool = False  # between two requests

    def cut(self, why: str = "") -> None:
        """End the call where it waits for its client."""
        if self.timeout is not None and not self.timeout.expired():
            self.why = why or self.why
            self.timeout.reschedule(0)


class Dispatcher:
    """Serves ``sparseps.v1.ParameterServerService``. All coroutines run on one event loop.

    Args:
        handlers: by the method's name.
        authenticator: knows callers.
        settings: the shard's place, and the limits of each call.
        metrics: counts and times each request.
        counted: context of a request that changes the shard, which a drain waits for.
        apply_thread: for which the event loop stands in where a request is little work.
        is_small: tells whether the shard is so small that its requests are.

    Attributes:
        service: the service's handler for a gRPC server.
    """

    def __init__(
        self,
        handlers: dict[str, Handler],
        authenticator: Authenticator,
        settings: ServerSettings,
        metrics: Metrics,
        counted: Callable[[], Any],
        apply_thread: ApplyThread,
        is_small: Callable[[], bool],
    ) -> None:
        self._authenticator, self._settings, self._metrics = authenticator, settings, metrics
        self._counted, self._apply_thread, self._is_small = counted, apply_thread, is_small
        self._pools = {
            lane: ThreadPoolExecutor(_LANE_THREADS.get(lane, settings.rpc_threads), f"rpc-{lane.value}")
            for lane in Lane
        }
        self.open_calls: set[_OpenCall] = set()
        self._silent: dict[_OpenCall, None] = {}
        self._idle: dict[tuple[str, Identity], _OpenCall] = {}  # the idle stream of each worker
        self._waiting: dict[Identity, asyncio.Event] = {}  # pulls that wait for a push of their worker
        self._sweeping: asyncio.Task[None] | None = None
        self._joins = asyncio.Semaphore(_MOST_JOINS)
        self._penalty = Penalty()
        self._request_budget = MemoryBudget(_REQUEST_BYTES)
        self._stopping = False
        self._threads_at_work = dict.fromkeys(Lane, 0)  # requests that have a thread, or wait for one
        self._by_threads = dict.fromkeys(handlers, 0)  # pieces of work that threads have done or do
        metrics.running_calls.set_function(lambda: sum(self._threads_at_work.values()))
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            rpc: grpc.stream_stream_rpc_method_handler(partial(self._serve, rpc, handler))
            for rpc, handler in handlers.items()
        }
        self.service: grpc.GenericRpcHandler = grpc.method_handlers_generic_handler(SERVICE.full_name, methods)

    async def drain(self, seconds: float) -> None:
        """Refuse new calls, and return when none is left, or after so many seconds.

        Calls that wait for their client have a short time only, silent and idle ones none; they end with ``DRAINING``.
        """
        self._stopping = True
        begun = time.monotonic()
        while self.open_calls and (age := time.monotonic() - begun) < seconds:
            for each in self.open_calls:
                if age > _STOP_SECONDS or each.is_idle or each in self._silent:
                    each.cut()
            await asyncio.sleep(_STOP_POLL_SECONDS)
        if self._sweeping is not None:
            self._sweeping.cancel()

    def close(self) -> None:
        """Wait for the running work, and end the threads."""
        for pool in self._pools.values():
            pool.shutdown()

    # One call

    async def _serve(self, rpc: str, handler: Handler, _: Any, context: Any) -> None:
        try:
            await self._serve_or_refuse(rpc, handler, context)
        except grpc.aio.InternalError:  # the client has gone, or has not read what was sent
            raise asyncio.CancelledError from None

    async def _serve_or_refuse(self, rpc: str, handler: Handler, context: Any) -> None:
        """Serve a call; end one that fails with its status, later where its caller makes many of them."""
        opened: _OpenCall | None = None
        wait = 0.0
        try:
            with self._admitted(rpc, context) as opened:
                if opened.rule.stays_open:
                    await self._serve_requests(opened, handler)
                else:
                    await self._serve_request(opened, handler)
            return
        except Rejected as refusal:
            if is_fault(refusal):
                wait = self._penalty.seconds(context.peer(), 0 if opened is None else opened.call.received_bytes)
            self._metrics.refusals.labels(reason=refusal.reason.name).inc()
            level = logging.INFO if refusal.retry_seconds is None else logging.DEBUG
            reason = {"reason": refusal.reason.name, "detail": refusal.detail}
            log.log(level, "refused", extra={"rpc": rpc, "peer": context.peer(), **reason})
            end = partial(context.abort_with_status, to_status(refusal))
        except _StalledError as stalled:
            self._metrics.calls_cut.labels(rpc=rpc, why=str(stalled)).inc()
            wait = self._penalty.seconds(context.peer())
            end = partial(context.abort, grpc.StatusCode.CANCELLED, f"the call was cut: {stalled}")
        except (asyncio.CancelledError, grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError):
            raise
        except Exception:
            if context.done() or context.cancelled():
                return  # the client has gone; nobody waits for an answer
            log.exception("internal error", extra={"rpc": rpc})
            await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")
        if wait:  # nothing of the call is in memory meanwhile
            await asyncio.sleep(wait)
        await end()

    @contextmanager
    def _admitted(self, rpc: str, context: Any) -> Iterator[_OpenCall]:
        """Admit a call by its headers; raises :class:`Rejected`."""
        rule = RULES[rpc]
        metadata = context.invocation_metadata()
        caller = self._authenticator.admit(metadata, rpc, rule.role)
        headers = dict(metadata)
        if SHARD_HEADER in headers:
            require_place(self._settings, str(headers[SHARD_HEADER]))
        if self._stopping:
            raise Rejected(ErrorCode.DRAINING, "the server is stopping")
        if len(self.open_calls) >= _MOST_CALLS:
            raise Rejected(ErrorCode.BUSY, f"{_MOST_CALLS} calls are open", retry_seconds=1.0)
        parent = headers.get(TRACEPARENT)
        call = Call(rpc, caller)
        if isinstance(parent, str) and not rule.stays_open:
            call.span = tracing.continued(rpc, parent)
        opened = _OpenCall(call, context, rule, time.monotonic())
        self.open_calls.add(opened)
        self._silent[opened] = None
        if len(self._silent) > _MOST_SILENT:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.cut("gave_way")
        try:
            yield opened
        finally:
            self.open_calls.discard(opened)
            self._silent.pop(opened, None)

    @contextmanager
    def _measured(self, opened: _OpenCall) -> Iterator[None]:
        """Count, time and trace a request."""
        status = "OK"
        try:
            with self._counted() if opened.rule.changes else nullcontext():
                yield
        except BaseException as error:
            if not (opened.is_answered and isinstance(error, asyncio.CancelledError)):  # hanging up is then no error
                status = error.reason.status_name if isinstance(error, Rejected) else type(error).__name__
            raise
        finally:
            self._metrics.call_seconds.labels(rpc=opened.call.rpc).observe(time.monotonic() - opened.started)
            opened.call.span.note(status=status)
            opened.call.span.end("" if status == "OK" else status)

    async def _serve_request(self, opened: _OpenCall, handler: Handler) -> None:
        """Serve a call of one request."""
        with self._measured(opened):
            if opened.rule.in_parts:
                answers = await self._read_stream(opened, handler, await self._read(opened))
            else:
                answers = await self._read_one(opened, handler)
            await self._answer(opened, answers)

    async def _serve_requests(self, opened: _OpenCall, handler: Handler) -> None:
        """Serve the requests of a stream that stays open, one after another."""
        metadata = opened.context.invocation_metadata()
        while True:
            first = await self._read_idle(opened)
            if first[0] is None:
                return
            self._authenticator.admit(metadata, opened.call.rpc, opened.rule.role)  # a token may be withdrawn
            opened.call = Call(opened.call.rpc, opened.call.caller)
            opened.started, opened.is_answered = time.monotonic(), False
            with self._measured(opened):
                if opened.rule.in_parts:
                    answers = await self._read_stream(opened, handler, first)
                else:
                    answers = await self._in_turn(opened, cast(Callable[[Call, Message], Answer], handler), first[0])
                await self._answer(opened, answers)

    async def _read_one(self, opened: _OpenCall, handler: Handler) -> Answers:
        async with AsyncExitStack() as turn:
            if opened.rule.lane is Lane.JOIN:
                await self._wait(opened, self._joins.acquire(), "turn")
                turn.callback(self._joins.release)
            raw, _ = await self._read(opened, _REQUEST_SECONDS)
        if raw is None:
            raise Rejected(ErrorCode.BAD_REQUEST, f"{opened.call.rpc} takes exactly one message")
        with self._request_budget.open() as reservation:
            reservation.add(received_bytes(len(raw)))
            answer = cast(Callable[[Call, Message], Answer], handler)
            return await self._in_thread(opened, partial(reply_to, opened.call, answer, raw))

    async def _in_turn(self, opened: _OpenCall, handler: Callable[[Call, Message], Answer], raw: bytes) -> Answers:
        """Answer a request, once the push that it comes behind is applied."""
        work = partial(reply_to, opened.call, handler, raw)
        with self._request_budget.open() as reservation:
            reservation.add(received_bytes(len(raw)))
            while True:
                try:
                    return await self._in_thread(opened, work, small=self._is_small())
                except NotYetError as early:
                    await self._until_pushed(opened, early)

    async def _until_pushed(self, opened: _OpenCall, early: NotYetError) -> None:
        """Wait until the next push of a worker has been answered, one way or the other."""
        pushed = self._waiting.setdefault(early.identity, asyncio.Event())
        try:
            if not early.is_over():
                await self._wait(opened, pushed.wait(), "push")
        except BaseException:
            self._waiting.pop(early.identity, None)
            pushed.set()  # another pull of this worker begins to wait anew
            raise

    async def _read_stream(self, opened: _OpenCall, handler: Handler, first: _Message) -> Answers:
        """Send the messages of a request into a reader, each as it arrives."""
        call, message = opened.call, first
        reading = cast(Callable[[Call], StreamReader], handler)(call)
        try:
            next(reading)
            while True:
                size = len(message[0] or b"")
                if call.reservation is not None:
                    call.reservation.add(received_bytes(size))
                is_small = opened.rule.stays_open and size <= _SMALL_BYTES and self._is_small()
                answers = await self._in_thread(opened, partial(feed, call, reading, *message), small=is_small)
                if answers is not None:
                    return answers
                message = await self._read(opened)
        finally:
            reading.close()
            if call.identity is not None and (waiting := self._waiting.pop(call.identity, None)) is not None:
                waiting.set()

    async def _answer(self, opened: _OpenCall, answers: Answers) -> None:
        (batch, is_last), others = answers
        if opened.call.finish is not None:
            await self._in_thread(opened, opened.call.finish)
        with closing(others):
            while True:
                for number, data in enumerate(batch, start=1):
                    opened.is_answered = is_last and number == len(batch)
                    await self._wait(opened, opened.context.write(data), "reader")
                if is_last:
                    return
                batch, is_last = await self._in_thread(opened, partial(next, others))

    # Waiting for the client, and for threads

    async def _read(self, opened: _OpenCall, seconds: float = math.inf) -> _Message:
        """Return the client's next message."""
        raw = await self._wait(opened, opened.context.read(), "request", seconds)
        self._silent.pop(opened, None)
        return (None if raw is grpc.aio.EOF else raw), time.perf_counter_ns()

    async def _read_idle(self, opened: _OpenCall) -> _Message:
        """Return the first message of a stream's next request, for which a worker with a lease has any time.

        A worker has one idle stream for each call: a stream that an older connection has left gives way.
        """
        identity = opened.call.identity
        if identity is None:
            return await self._read(opened)
        if self._stopping:
            raise Rejected(ErrorCode.DRAINING, "the server is stopping")
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._cut_abandoned())
        key = (opened.call.rpc, identity)
        if key in self._idle:
            self._idle[key].cut("gave_way")
        self._idle[key], opened.is_idle = opened, True
        opened.started = time.monotonic()
        try:
            async with asyncio.timeout(None) as opened.timeout:
                raw = await opened.context.read()
        except TimeoutError:
            if self._stopping:
                raise Rejected(ErrorCode.DRAINING, "the server is stopping") from None
            raise _StalledError(opened.why) from None
        finally:
            opened.timeout, opened.is_idle = None, False
            if self._idle.get(key) is opened:
                del self._idle[key]
        return (None if raw is grpc.aio.EOF else raw), time.perf_counter_ns()

    async def _cut_abandoned(self) -> None:
        """End the idle streams of workers whose leases have ended."""
        while True:
            await asyncio.sleep(self._settings.stream_idle_seconds / 4)
            for opened in list(self._idle.values()):
                silent = time.monotonic() - opened.started
                if silent > self._settings.stream_idle_seconds and not opened.call.has_lease():
                    opened.cut("idle_request")

    async def _wait(self, opened: _OpenCall, client: Awaitable[Any], what: str, seconds: float = math.inf) -> Any:
        """Wait for the client, within the limits; raises :class:`_StalledError`, or ``Rejected`` (``DRAINING``)."""
        idle = min(self._settings.stream_idle_seconds, seconds, _STOP_SECONDS if self._stopping else math.inf)
        left = self._settings.stream_seconds - (time.monotonic() - opened.started)
        opened.why = f"idle_{what}" if idle <= left else "too_long"
        now = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(now + max(0.0, min(idle, left))) as opened.timeout:
                return await client
        except TimeoutError:
            if self._stopping:
                raise Rejected(ErrorCode.DRAINING, "the server is stopping") from None
            raise _StalledError(opened.why) from None
        finally:
            opened.timeout = None

    async def _in_thread(self, opened: _OpenCall, work: Callable[[], Result], *, small: bool = False) -> Result:
        """Run work in the call's lane, or here where it is small and nothing else is done with the parameters.

        A call that is cancelled meanwhile ends when its work has.
        """
        run = partial(opened.call.span.run, work)
        lane = opened.rule.lane
        # A thread that is at work may own a lock, and wait for the apply thread.
        if small and self._by_threads[opened.call.rpc] >= _FIRST_PIECES and not self._threads_at_work[lane]:
            with self._apply_thread.stand_in() as is_free:
                if is_free:
                    return run()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()
        self._threads_at_work[lane] += 1
        self._by_threads[opened.call.rpc] += 1
        try:
            future = self._pools[lane].submit(run)
            future.add_done_callback(lambda ended: loop.call_soon_threadsafe(_copy, ended, done))
            try:
                return await done
            except asyncio.CancelledError:
                ended = asyncio.wrap_future(future)
                await asyncio.wait([ended])
                if not ended.cancelled():
                    ended.exception()  # fetched, or asyncio logs that nobody did
                raise
        finally:
            self._threads_at_work[lane] -= 1


def _copy(ended: "Future[Result]", done: "asyncio.Future[Result]") -> None:
    """Hand a thread's result over to the event loop; a third of the work of :func:`asyncio.wrap_future`."""
    if done.cancelled():
        return
    error = ended.exception()
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(ended.result())

"""Every call's headers, time and threads, on one event loop; handlers know the meaning of calls.

A caller is known by its headers before a message of its call is read, and a call occupies no thread while it waits for
its client: threads work on messages that have arrived. Messages are read as raw bytes and parsed here, since a
deserialiser that fails inside gRPC leaks its input.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from pscore.telemetry import tracing
from pscore.telemetry.span import NO_SPAN, TRACEPARENT, TraceSpan
from pscore.wire.errors import ErrorCode, Rejected, to_status
from pscore.wire.frames import FRAMING_BYTES
from pscore.wire.messages import SHARD_HEADER
from psservice.observability.metrics import Metrics
from psservice.rpc.auth import Authenticator
from psservice.rpc.calls import RULES, SERVICE, Answer, Call, Handler, Lane, Rule, StreamReader, parse, require_place
from psservice.rpc.memory_budget import MemoryBudget, received_bytes
from psservice.rpc.penalty import Penalty, is_fault
from psservice.settings import ServerSettings

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_Batch: TypeAlias = tuple[list[bytes], bool]  # serialized answers, and whether no more follow
_Answers: TypeAlias = tuple[_Batch, Generator[_Batch, None, None]]  # the first batch, which is made, and those behind

_FIRST_BYTES = 16 << 10  # of a stream, after which its header is checked
_SOON_SECONDS = 0.005  # or after so long in which nothing follows, or at the stream's end
_BATCH_BYTES = 128 << 10  # of messages that a thread reads in one piece of work
_ANSWER_BYTES = 1 << 20  # of messages that a thread writes in one piece of work
_LANE_THREADS = {Lane.LEASE: 2, Lane.JOIN: 2, Lane.OPERATOR: 4}
_MOST_CALLS = 4096
_MOST_SILENT = 256  # calls without a message; beyond that the oldest is cut
_MOST_JOINS = 16  # whose message is received at once, since it may be of megabytes
_REQUEST_SECONDS = 10.0  # for the message of a call that has one
_REQUEST_BYTES = 64 << 20  # of calls of one message, until their first answers are made
_STOP_SECONDS = 2.0  # for calls that wait for their client, from the moment the server stops
_STOP_POLL_SECONDS = 0.02


class _StalledError(Exception):
    """The client has stalled a call for too long, or the server stops."""


@dataclass(slots=True, eq=False)
class _OpenCall:
    """The event loop's side of a call."""

    call: Call
    context: Any
    rule: Rule
    span: TraceSpan
    started: float
    timeout: asyncio.Timeout | None = None
    why: str = ""
    is_answered: bool = False  # the last message is on its way

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
        metrics: counts and times each call.
        counted: context of a call that changes the shard, which a drain waits for.

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
    ) -> None:
        self._authenticator, self._settings, self._metrics = authenticator, settings, metrics
        self._counted = counted
        self._pools = {
            lane: ThreadPoolExecutor(_LANE_THREADS.get(lane, settings.rpc_threads), f"rpc-{lane.value}")
            for lane in Lane
        }
        self.open_calls: set[_OpenCall] = set()
        self._silent: dict[_OpenCall, None] = {}
        self._joins = asyncio.Semaphore(_MOST_JOINS)
        self._penalty = Penalty()
        self._request_budget = MemoryBudget(_REQUEST_BYTES)
        self._stopping = False
        self._at_work = 0  # calls that have a thread of their lane, or wait for one
        metrics.running_calls.set_function(lambda: self._at_work)
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            rpc: grpc.stream_stream_rpc_method_handler(partial(self._serve, rpc, handler))
            for rpc, handler in handlers.items()
        }
        self.service: grpc.GenericRpcHandler = grpc.method_handlers_generic_handler(SERVICE.full_name, methods)

    async def drain(self, seconds: float) -> None:
        """Refuse new calls, and return when none is left, or after so many seconds.

        Calls that wait for their client have a short time only, silent ones none; they end with ``DRAINING``.
        """
        self._stopping = True
        begun = time.monotonic()
        while self.open_calls and (age := time.monotonic() - begun) < seconds:
            for each in self.open_calls:
                if age > _STOP_SECONDS or each in self._silent:
                    each.cut()
            await asyncio.sleep(_STOP_POLL_SECONDS)

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
            async with self._admitted(rpc, context) as opened:
                read = self._read_stream if SERVICE.methods_by_name[rpc].client_streaming else self._read_one
                await self._answer(opened, await read(opened, handler))
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

    @asynccontextmanager
    async def _admitted(self, rpc: str, context: Any) -> AsyncIterator[_OpenCall]:
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
        span = tracing.continued(rpc, parent) if isinstance(parent, str) else NO_SPAN
        opened = _OpenCall(Call(rpc, caller), context, rule, span, time.monotonic())
        self.open_calls.add(opened)
        self._silent[opened] = None
        if len(self._silent) > _MOST_SILENT:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.cut("gave_way")
        status = "OK"
        try:
            with self._counted() if rule.changes else nullcontext():
                yield opened
        except BaseException as error:
            if not (opened.is_answered and isinstance(error, asyncio.CancelledError)):  # hanging up is then no error
                status = error.reason.status_name if isinstance(error, Rejected) else type(error).__name__
            raise
        finally:
            self.open_calls.discard(opened)
            self._silent.pop(opened, None)
            self._metrics.call_seconds.labels(rpc=rpc).observe(time.monotonic() - opened.started)
            span.note(status=status)
            span.end("" if status == "OK" else status)

    async def _read_one(self, opened: _OpenCall, handler: Handler) -> _Answers:
        async with AsyncExitStack() as turn:
            if opened.rule.lane is Lane.JOIN:
                await self._wait(opened, self._joins.acquire(), "turn")
                turn.callback(self._joins.release)
            raw = await self._next(opened, _REQUEST_SECONDS)
        if raw is None:
            raise Rejected(ErrorCode.BAD_REQUEST, f"{opened.call.rpc} takes exactly one message")

        def work() -> _Answers:
            answer = cast(Callable[[Call, Message], Answer], handler)
            return _begin(opened.call, answer(opened.call, parse(opened.call, raw)))

        with self._request_budget.open() as reservation:
            reservation.add(received_bytes(len(raw)))
            return await self._in_thread(opened, work)

    async def _read_stream(self, opened: _OpenCall, handler: Handler) -> _Answers:
        """Send a stream into a reader in batches, a small stream as a whole."""
        call = opened.call
        reading = cast(Callable[[Call], StreamReader], handler)(call)
        try:
            opened.span.run(next, reading)
            pending: list[tuple[bytes, int]] = []
            size, most = 0, _FIRST_BYTES

            async def feed() -> None:
                nonlocal pending, size, most
                batch, pending, size, most = pending, [], 0, _BATCH_BYTES
                await self._in_thread(opened, lambda: _feed(call, reading, batch))

            while (raw := await self._next_or(opened, feed if pending and most == _FIRST_BYTES else None)) is not None:
                if call.reservation is not None:
                    call.reservation.add(received_bytes(len(raw)))
                pending.append((raw, time.perf_counter_ns()))
                size += len(raw)
                if size >= most:
                    await feed()
            rest = pending

            def finish() -> _Answers:
                _feed(call, reading, rest)
                try:
                    reading.send(None)
                except StopIteration as end:
                    return _begin(call, end.value)
                raise AssertionError("a reader must end where its stream ends")

            return await self._in_thread(opened, finish)
        finally:
            reading.close()

    async def _answer(self, opened: _OpenCall, answers: _Answers) -> None:
        (batch, is_last), others = answers
        with closing(others):
            while True:
                for number, data in enumerate(batch, start=1):
                    opened.is_answered = is_last and number == len(batch)
                    await self._wait(opened, opened.context.write(data), "reader")
                if is_last:
                    return
                batch, is_last = await self._in_thread(opened, partial(next, others))

    # Waiting for the client, and for threads

    async def _next(self, opened: _OpenCall, seconds: float = math.inf) -> bytes | None:
        """Return the client's next message; ``None`` at the end of its stream."""
        raw = await self._wait(opened, opened.context.read(), "request", seconds)
        self._silent.pop(opened, None)
        if raw is grpc.aio.EOF:
            return None
        data: bytes = raw
        opened.call.received_bytes += len(data) + FRAMING_BYTES
        if opened.call.raw is not None:
            opened.call.raw.append(data)
        return data

    async def _next_or(self, opened: _OpenCall, idle: Callable[[], Awaitable[None]] | None) -> bytes | None:
        """Return the next message; run ``idle`` meanwhile where none arrives at once."""
        if idle is None:
            return await self._next(opened)
        coming = asyncio.ensure_future(self._next(opened))
        try:
            done, _ = await asyncio.wait({coming}, timeout=_SOON_SECONDS)
            if not done:
                await idle()
            return await coming
        finally:
            coming.cancel()

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

    async def _in_thread(self, opened: _OpenCall, work: Callable[[], Result]) -> Result:
        """Run work in the call's lane; a call that is cancelled meanwhile ends when its work has."""
        loop = asyncio.get_running_loop()
        self._at_work += 1
        future = loop.run_in_executor(self._pools[opened.rule.lane], opened.span.run, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # fetched, or asyncio logs that nobody did
            raise
        finally:
            self._at_work -= 1


def _begin(call: Call, answer: Answer) -> _Answers:
    batches = _batches(call, answer)
    return next(batches), batches


def _batches(call: Call, answer: Answer) -> Generator[_Batch, None, None]:
    """Serialize a handler's answers, in a thread of the call's lane."""
    batch, size = [], 0
    with closing((each for each in (answer,)) if isinstance(answer, Message) else answer) as messages:
        for message in messages:
            data = message if isinstance(message, bytes) else message.SerializeToString()
            call.on_sent(len(data) + FRAMING_BYTES)
            batch.append(data)
            size += len(data)
            if size >= _ANSWER_BYTES:
                yield batch, False
                batch, size = [], 0
    yield batch, True


def _feed(call: Call, reading: StreamReader, batch: list[tuple[bytes, int]]) -> None:
    """Send messages into a reader that continues after each of them."""
    call.on_received(sum(len(raw) for raw, _ in batch))
    for raw, call.arrived_nanoseconds in batch:
        reading.send(parse(call, raw))

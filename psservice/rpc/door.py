"""The door: every call's headers, time and threads, on one event loop; what a call means is left to its handler.

A caller is known by its headers before a message of it is read, and a call holds no thread while it waits for its
client: threads work on messages that have arrived. Messages are read as raw bytes and parsed here, since a deserialiser
that fails inside gRPC leaks what it was given.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from pscore.telemetry import tracing
from pscore.telemetry.span import NO_SPAN, TRACEPARENT, TraceSpan
from pscore.wire.errors import ErrorCode, Rejected, to_status
from pscore.wire.frames import FRAMING_BYTES
from pscore.wire.messages import SHARD_HEADER
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.observability.metrics import Metrics
from psservice.rpc import bounds
from psservice.rpc.auth import Authenticator
from psservice.rpc.calls import RULES, SERVICE, Answer, Call, Handler, Lane, Rule, StreamReader
from psservice.rpc.memory_budget import MemoryBudget, received_bytes
from psservice.rpc.penalty import Penalty, is_fault

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_FIRST_BYTES = 16 << 10  # of a stream after which its header is checked
_SOON_SECONDS = 0.005  # or after so long in which nothing follows it, or at its end
_BATCH_BYTES = 128 << 10  # of messages that one visit to a thread works on
_ANSWER_BYTES = 1 << 20  # of messages that one visit to a thread writes
_LANE_THREADS = {Lane.LEASE: 2, Lane.JOIN: 2, Lane.OPERATOR: 4}
_MOST_CALLS = 4096
_MOST_SILENT = 256  # calls of which no message has come; beyond that the oldest gives way
_MOST_JOINS = 16  # whose message is received at once, since it may be of megabytes
_REQUEST_SECONDS = 10.0  # for the message of a call that has one
_REQUEST_BYTES = 64 << 20  # of calls of one message, until their first answers are made
_STOP_SECONDS = 2.0
"""For calls that wait for their client, from the moment the server stops."""

_STOP_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Limits:
    """What a call may take.

    Attributes:
        idle_seconds: waiting for one message, either way.
        call_seconds: age from which a call may not wait any more.
        threads: of the calls that push and pull.
    """

    idle_seconds: float
    call_seconds: float
    threads: int


class _StalledError(Exception):
    """The client has kept a call waiting for too long, or the server stops."""


@dataclass(slots=True, eq=False)
class _Open:
    """A call as the event loop sees it."""

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


class Door:
    """Serves ``sparseps.v1.ParameterServerService``. All coroutines run on one event loop.

    Args:
        handlers: by the method's name.
        gate: knows callers.
        check_place: refuses a call whose header means another shard.
        limits: of each call.
        metrics: told of each call.
        counted: context of a call that changes the shard, which a drain waits for.
    """

    def __init__(
        self,
        handlers: dict[str, Handler],
        gate: Authenticator,
        check_place: Callable[[str], None],
        limits: Limits,
        metrics: Metrics,
        counted: Callable[[], Any],
    ) -> None:
        """Make the threads, which begin with the first calls."""
        self._gate, self._check_place = gate, check_place
        self._limits, self._metrics, self._counted = limits, metrics, counted
        self._pools = {
            lane: ThreadPoolExecutor(_LANE_THREADS.get(lane, limits.threads), thread_name_prefix=f"rpc-{lane.value}")
            for lane in Lane
        }
        self._open: set[_Open] = set()
        self._silent: dict[_Open, None] = {}
        self._joins = asyncio.Semaphore(_MOST_JOINS)
        self._penalty = Penalty()
        self._requests = MemoryBudget(_REQUEST_BYTES)
        self._stopping = False
        self._at_work = 0
        self._serve: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.stream_stream_rpc_method_handler(self._server_of(name, handler))
            for name, handler in handlers.items()
        }

    @property
    def open_calls(self) -> int:
        """Calls that have begun and not ended."""
        return len(self._open)

    @property
    def at_work(self) -> int:
        """Calls that have a thread of their lane, or wait for one."""
        return self._at_work

    def handler(self) -> grpc.GenericRpcHandler:
        """Return what a gRPC server is given."""
        return grpc.method_handlers_generic_handler(SERVICE.full_name, self._serve)

    async def drain(self, seconds: float) -> None:
        """Refuse new calls, and return when none is left, or after so many seconds.

        Calls that wait for their client have a short time only, silent ones none; they end with ``DRAINING``.
        """
        self._stopping = True
        begun = time.monotonic()
        while self._open and (age := time.monotonic() - begun) < seconds:
            for each in self._open:
                if age > _STOP_SECONDS or each in self._silent:
                    each.cut()
            await asyncio.sleep(_STOP_POLL_SECONDS)

    def close(self) -> None:
        """Wait for what threads are at, and end them."""
        for pool in self._pools.values():
            pool.shutdown()

    # One call

    def _server_of(self, rpc: str, handler: Handler) -> Callable[..., Any]:
        method = SERVICE.methods_by_name[rpc]
        request_type: type[Message] = getattr(pb, method.input_type.name)

        async def serve(_: Any, context: Any) -> None:
            try:
                await call(context)
            except grpc.aio.InternalError:  # gRPC's word for a client that is gone, or has not read what was sent
                raise asyncio.CancelledError from None

        async def call(context: Any) -> None:
            opened: _Open | None = None
            try:
                async with self._admitted(rpc, context) as opened:
                    if method.client_streaming:
                        answers = await self._read_stream(opened, request_type, handler)
                    else:
                        answers = await self._read_one(opened, request_type, handler)
                    await self._answer(opened, answers)
                    return
            except Rejected as refusal:
                nbytes = 0 if opened is None else opened.call.received_bytes
                wait = self._penalty.seconds(context.peer(), nbytes) if is_fault(refusal) else 0.0
                end = partial(context.abort_with_status, self._refused(context, rpc, refusal))
            except _StalledError as stalled:
                self._metrics.calls_cut.labels(rpc=rpc, why=str(stalled)).inc()
                wait = self._penalty.seconds(context.peer())
                end = partial(context.abort, grpc.StatusCode.CANCELLED, f"the call was cut: {stalled}")
            except (asyncio.CancelledError, grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError):
                raise
            except Exception:
                if context.done() or context.cancelled():
                    return  # the client is gone; there is nobody to answer
                log.exception("internal error", extra={"rpc": rpc})
                await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")
            if wait:  # nothing of the call is held meanwhile
                await asyncio.sleep(wait)
            await end()

        return serve

    @asynccontextmanager
    async def _admitted(self, rpc: str, context: Any) -> AsyncIterator[_Open]:
        """Let a call in by its headers; raises :class:`Rejected`."""
        rule = RULES[rpc]
        metadata = context.invocation_metadata()
        caller = self._gate.admit(metadata, rpc, rule.role)
        headers = dict(metadata)
        if SHARD_HEADER in headers:
            self._check_place(str(headers[SHARD_HEADER]))
        if self._stopping:
            raise Rejected(ErrorCode.DRAINING, "the server is stopping")
        if len(self._open) >= _MOST_CALLS:
            raise Rejected(ErrorCode.BUSY, f"{_MOST_CALLS} calls are open", retry_seconds=1.0)
        parent = headers.get(TRACEPARENT)
        span = tracing.continued(rpc, parent) if isinstance(parent, str) else NO_SPAN
        opened = _Open(Call(rpc, caller), context, rule, span, time.monotonic())
        self._open.add(opened)
        self._silent[opened] = None
        if len(self._silent) > _MOST_SILENT:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.cut("gave_way")
        status = "OK"
        try:
            if rule.changes:
                with self._counted():
                    yield opened
            else:
                yield opened
        except BaseException as error:
            if not (opened.is_answered and isinstance(error, asyncio.CancelledError)):  # who has it all may hang up
                status = error.reason.status_name if isinstance(error, Rejected) else type(error).__name__
            raise
        finally:
            self._open.discard(opened)
            self._silent.pop(opened, None)
            self._metrics.call_seconds.labels(rpc=rpc).observe(time.monotonic() - opened.started)
            span.note(status=status)
            span.end("" if status == "OK" else status)

    async def _read_one(self, opened: _Open, request_type: type[Message], handler: Handler) -> "_Answers":
        if opened.rule.lane is Lane.JOIN:
            await self._wait(opened, self._joins.acquire(), "turn")
        try:
            raw = await self._next(opened, _REQUEST_SECONDS)
        finally:
            if opened.rule.lane is Lane.JOIN:
                self._joins.release()
        if raw is None:
            raise Rejected(ErrorCode.BAD_REQUEST, f"{opened.call.rpc} takes exactly one message")

        def work() -> _Answers:
            answer = cast(Callable[[Call, Message], Answer], handler)
            return _Answers.of(opened.call, answer(opened.call, _parsed(request_type, raw)))

        with self._requests.open() as charge:
            charge.add(received_bytes(len(raw)))
            return await self._in_thread(opened, work)

    async def _read_stream(self, opened: _Open, request_type: type[Message], handler: Handler) -> "_Answers":
        """Feed a reader in batches, a small stream as a whole."""
        call = opened.call
        reading = cast(Callable[[Call], StreamReader], handler)(call)
        try:
            opened.span.run(next, reading)
            pending: list[tuple[bytes, int]] = []
            size, most = 0, _FIRST_BYTES

            async def feed() -> None:
                nonlocal pending, size, most
                batch, pending, size, most = pending, [], 0, _BATCH_BYTES
                await self._in_thread(opened, lambda: _feed(call, reading, request_type, batch))

            while (raw := await self._next_or(opened, feed if pending and most == _FIRST_BYTES else None)) is not None:
                if call.charge is not None:
                    call.charge.add(received_bytes(len(raw)))
                pending.append((raw, time.perf_counter_ns()))
                size += len(raw)
                if size >= most:
                    await feed()
            rest = pending

            def finish() -> _Answers:
                _feed(call, reading, request_type, rest)
                try:
                    reading.send(None)
                except StopIteration as end:
                    return _Answers.of(call, end.value)
                raise AssertionError("a reader must end where its stream ends")

            return await self._in_thread(opened, finish)
        finally:
            reading.close()

    async def _answer(self, opened: _Open, answers: "_Answers") -> None:
        try:
            while True:
                for number, data in enumerate(answers.batch, start=1):
                    opened.is_answered = answers.ended and number == len(answers.batch)
                    await self._wait(opened, opened.context.write(data), "reader")
                if answers.ended:
                    return
                await self._in_thread(opened, answers.more)
        finally:
            answers.close()

    # Waiting for the client, and for threads

    async def _next(self, opened: _Open, seconds: float = math.inf) -> bytes | None:
        """Return the client's next message; ``None`` at the end of its stream."""
        raw = await self._wait(opened, opened.context.read(), "request", seconds)
        self._silent.pop(opened, None)
        if raw is grpc.aio.EOF:
            return None
        data: bytes = raw
        opened.call.received_bytes += len(data) + FRAMING_BYTES
        if opened.call.keeps_raw:
            opened.call.raw.append(data)
        return data

    async def _next_or(self, opened: _Open, idle: Callable[[], Awaitable[None]] | None) -> bytes | None:
        """Return the next message; where it does not come at once, do something meanwhile."""
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

    async def _wait(self, opened: _Open, client: Awaitable[Any], what: str, seconds: float = math.inf) -> Any:
        """Wait for the client, within the limits; raises :class:`_StalledError`, or ``Rejected`` (``DRAINING``)."""
        idle = min(self._limits.idle_seconds, seconds, _STOP_SECONDS if self._stopping else math.inf)
        left = self._limits.call_seconds - (time.monotonic() - opened.started)
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

    async def _in_thread(self, opened: _Open, work: Callable[[], Result]) -> Result:
        """Run work in the call's lane; a call that is cancelled meanwhile ends when its work has."""
        loop = asyncio.get_running_loop()
        self._at_work += 1
        future = loop.run_in_executor(self._pools[opened.rule.lane], opened.span.run, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # nobody else will ask
            raise
        finally:
            self._at_work -= 1

    def _refused(self, context: Any, rpc: str, refusal: Rejected) -> grpc.Status:
        self._metrics.refusals.labels(reason=refusal.reason.name).inc()
        log.log(
            logging.DEBUG if refusal.retry_seconds is not None else logging.INFO,
            "refused",
            extra={"rpc": rpc, "peer": context.peer(), "reason": refusal.reason.name, "detail": refusal.detail},
        )
        return to_status(refusal)


class _Answers:
    """What a handler answers, written batch by batch in a thread.

    Attributes:
        batch: messages that are written and not sent.
        ended: whether no more follow.
    """

    def __init__(self, call: Call, messages: Iterator[Message]) -> None:
        self._call, self._messages = call, messages
        self.batch: list[bytes] = []
        self.ended = False

    @classmethod
    def of(cls, call: Call, answer: Answer) -> "_Answers":
        """Begin, with the first batch."""
        answers = cls(call, iter((answer,)) if isinstance(answer, Message) else answer)
        answers.more()
        return answers

    def more(self) -> None:
        """Write the next batch."""
        self.batch, size = [], 0
        while size < _ANSWER_BYTES:
            message = next(self._messages, None)
            if message is None:
                self.ended = True
                break
            data = message.SerializeToString()
            self._call.on_sent(len(data) + FRAMING_BYTES)
            self.batch.append(data)
            size += len(data)

    def close(self) -> None:
        """Let the handler end."""
        close = getattr(self._messages, "close", None)
        if close is not None:
            close()


def _parsed(request_type: type[Message], raw: bytes) -> Message:
    """Parse a message; raises :class:`Rejected` (``BAD_REQUEST``)."""
    bounds.require_few_fields(request_type, raw)
    try:
        return request_type.FromString(raw)
    except DecodeError as error:
        raise Rejected(ErrorCode.BAD_REQUEST, f"a message is no {request_type.__name__}") from error


def _feed(call: Call, reading: StreamReader, request_type: type[Message], batch: list[tuple[bytes, int]]) -> None:
    """Send messages into a reader that goes on after each of them."""
    call.on_received(sum(len(raw) for raw, _ in batch))
    for raw, call.arrived_nanoseconds in batch:
        reading.send(_parsed(request_type, raw))

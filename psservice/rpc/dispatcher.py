"""Every call's headers, time and threads, on one event loop; handlers know the meaning of calls.

A caller is known by its headers before a message of its call is read, and a call occupies no thread while it waits for
its client: threads work on messages that have arrived. Messages are read as raw bytes and parsed here, since a
deserialiser that fails inside gRPC leaks its input.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import grpc
import grpc.aio
import torch
from google.protobuf.message import Message

from pscore.telemetry import tracing
from pscore.telemetry.span import NO_SPAN, TRACEPARENT
from pscore.wire.errors import ErrorCode, Rejected, to_status
from pscore.wire.frames import FRAMING_BYTES
from pscore.wire.messages import SHARD_HEADER
from psservice.awaiting import NotYetError
from psservice.memory_budget import MemoryBudget
from psservice.rpc.audit import AuditTrail
from psservice.rpc.auth import Authenticator, Credentials
from psservice.rpc.caller import Caller
from psservice.rpc.calls import (
    RULES,
    SERVICE,
    Answer,
    Answers,
    Call,
    Handler,
    Lane,
    LastStep,
    Rule,
    StreamReader,
    begin,
    feed,
    feed_and_finish,
    finish,
    more,
    parse,
    reply_to,
    require_place,
)
from psservice.rpc.charges import received_bytes
from psservice.rpc.open_call import OpenCall, StalledError, fetch_error
from psservice.rpc.penalty import Penalty, is_fault
from psservice.rpc.pool import Pool
from psservice.rpc.turns import Turns
from psservice.shard.shard import Shard
from psservice.values import Identity

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_OneMessage: TypeAlias = Callable[[Call, Message], Answer]
_InParts: TypeAlias = Callable[[Call], StreamReader]

_SMALL_BYTES = 16 << 10  # of a message of a push that is decoded sooner than handed over
_LANE_THREADS = {Lane.LEASE: 2, Lane.JOIN: 2, Lane.OPERATOR: 4, Lane.FINISH: 1, Lane.READ: 2, Lane.STANDBY: 1}
_MOST_AHEAD = 4  # calls of which a message that is not charged yet, 4 MiB at most, is received
_MOST_CALLS = 4096
_MOST_SILENT = 256  # calls without a message, two for each worker, one a reader; beyond that the oldest is cut
_MOST_SILENT_READERS = 1024  # who ask in the same moment
_MOST_JOINS = 16  # whose message is received at once, since it may be of megabytes
_REQUEST_SECONDS = 10.0  # for the message of a call that has one
_REQUEST_BYTES = 96 << 20  # of calls of one message, until their first answers are made; two thirds are received
_STOP_SECONDS = 2.0  # for calls that wait for their client, from the moment the server stops
_STOP_POLL_SECONDS = 0.02
_QUEUE_SECONDS = 0.2  # after which a push that found the queue full is sent again
_READERS_A_ROUND = 1  # messages to readers between two rounds of the loop, in which workers are served
_NO_GATE = nullcontext()


class Dispatcher:
    """Serves ``sparseps.v1.ParameterServerService``. All coroutines run on one event loop.

    Args:
        handlers: by the method's name.
        authenticator: knows callers.
        shard: has the settings with the limits of each call. Its drain waits for requests that change it.

    Attributes:
        service: the service's handler for a gRPC server.
        audit: writes who has called.
    """

    def __init__(self, handlers: dict[str, Handler], authenticator: Authenticator, shard: Shard) -> None:
        self._authenticator, self._shard = authenticator, shard
        self._settings, self._metrics, self._apply_thread = shard.settings, shard.metrics, shard.apply_thread
        self._pools = {
            lane: Pool(lane, _LANE_THREADS.get(lane, self._settings.rpc_threads), shard.environment) for lane in Lane
        }
        self.open_calls: set[OpenCall] = set()
        self._silent: dict[OpenCall, None] = {}
        self._idle: dict[tuple[str, Identity], OpenCall] = {}  # the idle stream of each worker
        self._waiters = shard.leases.waiters
        self._sweeping: asyncio.Task[None] | None = None
        self._joins = asyncio.Semaphore(_MOST_JOINS)
        self._read_turns = Turns(_READERS_A_ROUND)
        self._penalty = Penalty()
        self.audit = AuditTrail(authenticator)
        self._held_back = 0  # calls that have ended, of callers that make many mistakes
        self._request_budget = MemoryBudget(_REQUEST_BYTES)  # pushes may fill the shard's: leases are renewed
        self._join_budget = MemoryBudget(_REQUEST_BYTES)  # else joins that wait would keep renewals out
        self._stopping = False
        self._ahead = 0  # calls whose messages are received ahead
        self._metrics.running_calls.set_function(lambda: sum(pool.at_work for pool in self._pools.values()))
        self._metrics.queued.set_function(lambda: self.queued)
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            rpc: grpc.stream_stream_rpc_method_handler(partial(self._serve, rpc, handler))
            for rpc, handler in handlers.items()
        }
        self.service: grpc.GenericRpcHandler = grpc.method_handlers_generic_handler(SERVICE.full_name, methods)

    @property
    def queued(self) -> int:
        """Pushes and pulls at work, or waiting for a thread; what ``--apply-queue-limit`` limits."""
        return self._pools[Lane.WORK].at_work

    async def drain(self, seconds: float) -> None:
        """Refuse new calls, and return when none is left, or after so many seconds.

        Calls that wait for their client have a short time only, silent and idle ones none; they end with ``DRAINING``.
        """
        self._stopping = True
        self._waiters.wake()
        clock = asyncio.get_running_loop().time
        begun = clock()
        while self.open_calls and (age := clock() - begun) < seconds:
            for each in self.open_calls:
                if age > _STOP_SECONDS or each.is_idle or each in self._silent:
                    each.cut()
            await asyncio.sleep(_STOP_POLL_SECONDS)
        if self._sweeping is not None:
            self._sweeping.cancel()

    def close(self) -> None:
        """Wait for the running work, and end the threads."""
        for pool in self._pools.values():
            pool.close()

    # One call

    async def _serve(self, rpc: str, handler: Handler, _: Any, context: Any) -> None:
        try:
            await self._serve_or_refuse(rpc, handler, context)
        except grpc.aio.InternalError:  # the client has gone, or has not read what was sent
            raise asyncio.CancelledError from None

    async def _serve_or_refuse(self, rpc: str, handler: Handler, context: Any) -> None:
        """Serve a call; end one that fails with its status, later if its caller makes many of them."""
        opened: OpenCall | None = None
        credentials: Credentials | None = None
        wait = 0.0
        try:
            credentials = self._authenticator.credentials_of(context)
            caller = await self._authenticator.admit(credentials, rpc, RULES[rpc].role)
            with self._admitted(rpc, caller, context) as opened:
                if opened.rule.stays_open:
                    await self._serve_requests(opened, handler, credentials)
                else:
                    await self._serve_request(opened, handler)
            return
        except Rejected as refusal:
            if is_fault(refusal):
                wait = self._penalty.seconds(context.peer(), 0 if opened is None else opened.call.received_bytes)
            self._metrics.refusals.labels(reason=refusal.reason.name).inc()
            if opened is None or not opened.rule.is_audited:
                self.audit.refused(rpc, context, credentials, refusal)
            end = partial(context.abort_with_status, to_status(refusal))
        except StalledError as stalled:
            self._metrics.calls_cut.labels(rpc=rpc, why=str(stalled)).inc()
            wait = self._penalty.seconds(context.peer())
            end = partial(context.abort, grpc.StatusCode.CANCELLED, f"the call was cut: {stalled}")
        except (asyncio.CancelledError, grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError):
            raise
        except torch.AcceleratorError as error:
            # A GPU's error stays, and every later call would meet it: only another process can recover.
            try:
                self._shard.apply_thread.fail(error)
            except Rejected as refusal:
                end = partial(context.abort_with_status, to_status(refusal))
        except Exception:
            log.exception("internal error", extra={"rpc": rpc})
            if context.done() or context.cancelled():
                return  # the client has gone; nobody waits for an answer
            end = partial(context.abort, grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")
        if wait and self._held_back < _MOST_CALLS:  # little of the call is in memory meanwhile
            self._held_back += 1
            try:
                await asyncio.sleep(wait)
            finally:
                self._held_back -= 1
        await end()

    @contextmanager
    def _admitted(self, rpc: str, caller: Caller, context: Any) -> Iterator[OpenCall]:
        """Admit a call by its headers; raises :class:`Rejected`."""
        rule = RULES[rpc]
        headers = dict(context.invocation_metadata())
        if SHARD_HEADER in headers:
            require_place(self._settings, str(headers[SHARD_HEADER]))
        self._require_serving()
        self._require_place_kept(rule)
        if len(self.open_calls) >= _MOST_CALLS:
            raise Rejected(ErrorCode.BUSY, f"{_MOST_CALLS} calls are open", retry_seconds=1.0)
        parent = headers.get(TRACEPARENT)
        call = Call(rpc, caller)
        if isinstance(parent, str) and not rule.stays_open:
            call.span = tracing.continued(rpc, parent)
        loop, task = asyncio.get_running_loop(), cast("asyncio.Task[Any]", asyncio.current_task())
        observe = self._metrics.call_seconds.of(rpc).observe
        opened = OpenCall(call, context, rule, self._pools[rule.lane], observe, loop, task, loop.time())
        self.open_calls.add(opened)
        self._silent[opened] = None
        if len(self._silent) > _MOST_SILENT and len(self._silent) > self._most_silent():
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.cut("gave_way")
        try:
            yield opened
        except StalledError:
            self._require_serving()
            raise
        finally:
            opened.end()
            self.open_calls.discard(opened)
            self._silent.pop(opened, None)

    def _most_silent(self) -> int:
        """Return how many calls may be without a message: each holds up to a window of one in gRPC."""
        shard = self._shard
        return _MOST_SILENT + 2 * len(shard.leases) + min(len(shard.cuts.readers), _MOST_SILENT_READERS)

    def _require_serving(self) -> None:
        if self._stopping:
            raise Rejected(ErrorCode.DRAINING, "the server is stopping")

    def _require_place_kept(self, rule: Rule) -> None:
        """Refuse a call if a standby has taken this shard's place, and serves it."""
        if rule.lane is Lane.OPERATOR or rule.serves_replaced or not self._shard.replaced_by:
            return
        raise Rejected(
            ErrorCode.REPLACED,
            "a standby serves in this server's place",
            generation=str(self._shard.replaced_by),
        )

    async def _measured(self, opened: OpenCall, answering: Coroutine[Any, Any, Answers]) -> None:
        """Send the answers to a request; count, time and trace the request."""
        status = "OK"
        try:
            with self._shard.drain_gate if opened.rule.changes else _NO_GATE:
                await self._answer(opened, await answering)
        except BaseException as error:
            if not (opened.is_answered and isinstance(error, asyncio.CancelledError)):  # hanging up is then no error
                status = error.reason.status_name if isinstance(error, Rejected) else type(error).__name__
            raise
        finally:
            opened.observe(opened.loop.time() - opened.started)
            if (span := opened.call.span) is not NO_SPAN:
                span.note(status=status)
                span.end("" if status == "OK" else status)

    async def _serve_request(self, opened: OpenCall, handler: Handler) -> None:
        """Serve a call of one request."""
        serving = self._measured(opened, self._read_whole(opened, handler))
        if not opened.rule.is_audited:
            await serving
            return
        try:
            await serving
        except BaseException as error:
            self.audit.operators_call(opened.call, opened.context, error)
            raise
        if opened.call.audit is not None:
            self.audit.operators_call(opened.call, opened.context, None)

    async def _serve_requests(self, opened: OpenCall, handler: Handler, credentials: Credentials) -> None:
        """Serve the requests of a stream that stays open, one after another."""
        rpc = opened.call.rpc
        answer = self._read_stream if opened.rule.in_parts else self._in_turn
        while (first := await self._read_idle(opened)) is not None:
            caller = await self._authenticator.admit(credentials, rpc, opened.rule.role)  # its line may have changed
            self._require_place_kept(opened.rule)
            opened.call = Call(rpc, caller)
            opened.started, opened.is_answered = opened.loop.time(), False
            await self._measured(opened, answer(opened, handler, first))

    async def _read_whole(self, opened: OpenCall, handler: Handler) -> Answers:
        """Answer a call of one request."""
        if opened.rule.in_parts:
            return await self._read_stream(opened, handler, await self._read(opened))
        async with AsyncExitStack() as turn:
            if opened.rule.lane is Lane.JOIN:
                await self._wait(opened, self._joins.acquire(), "turn")
                turn.callback(self._joins.release)
            raw = await self._read(opened, _REQUEST_SECONDS)
        if raw is None:
            raise Rejected(ErrorCode.BAD_REQUEST, f"{opened.call.rpc} takes exactly one message")
        return await self._in_turn(opened, handler, raw)

    async def _in_turn(self, opened: OpenCall, handler: Handler, raw: bytes) -> Answers:
        """Answer a request of one message, once what it waits for has happened."""
        budget = self._join_budget if opened.call.rpc == "Join" else self._request_budget
        with budget.receive() as reservation:  # it waits for a thread, or for others
            reservation.add(received_bytes(len(raw)))
            if not opened.rule.stays_open:
                work = partial(reply_to, opened.call, cast(_OneMessage, handler), raw)
                return await self._until_ready(opened, partial(opened.run, work))
            if len(raw) > _SMALL_BYTES:
                raise Rejected(ErrorCode.BAD_REQUEST, f"a {opened.call.rpc} request has up to {_SMALL_BYTES} bytes")
            opened.call.received_bytes = len(raw) + FRAMING_BYTES
            message = parse(opened.call, raw)
            return await self._until_ready(opened, partial(self._check_and_reply, opened, handler, message))

    async def _check_and_reply(self, opened: OpenCall, handler: Handler, message: Message) -> Answers:
        """Answer a small request: its handler checks here what it waits for; a thread makes the answers."""
        answers = cast(_OneMessage, handler)(opened.call, message)
        return await opened.run(partial(begin, opened.call, answers))

    async def _until_ready(self, opened: OpenCall, attempt: Callable[[], Awaitable[Result]]) -> Result:
        """Make an attempt, again whenever what it waits for has happened, as long as the call may wait."""
        call = opened.call
        while True:
            everyone = self._waiters.everyone
            try:
                return await attempt()
            except NotYetError as early:
                may_wait = call.wait_seconds or early.least_seconds
                if call.is_late or not may_wait:
                    raise
                call.wait_end = call.wait_end or opened.loop.time() + may_wait
                await self._until(opened, early, everyone)

    async def _until(self, opened: OpenCall, early: NotYetError, everyone: object) -> None:
        """Wait until a condition holds, the call may not wait any longer, or there is a reason to refuse it."""
        call, woken, begun = opened.call, opened.loop.create_future(), opened.loop.time()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        def is_refused() -> bool:
            has_left = call.identity is not None and not call.has_lease()
            return self._stopping or has_left or (opened.rule.changes and self._shard.drain_gate.is_closed)

        # Everyone may have been woken since the attempt has begun.
        self._waiters.add(
            wake, lambda: is_refused() or early.is_over() or self._waiters.everyone is not everyone, early.pusher
        )
        try:
            await opened.wait(woken, min(call.wait_end, begun + early.again_seconds), "others")
        except StalledError:
            opened.was_cut = False
        finally:
            self._waiters.remove(wake)
        self._require_serving()
        now = opened.loop.time()
        call.is_late = now >= call.wait_end or is_refused()
        opened.started += now - begun  # only waits for the client count

    async def _read_stream(self, opened: OpenCall, handler: Handler, raw: bytes | None) -> Answers:
        """Answer a request of several messages, of which ``raw`` is the first.

        It waits for a condition at its first message, which is then read anew, and at its last step.
        """
        if opened.rule.stays_open and opened.pool.at_work >= self._settings.apply_queue_limit:
            why = "too many requests are at work or wait for a thread (--apply-queue-limit)"
            raise Rejected(ErrorCode.BUSY, why, retry_seconds=_QUEUE_SECONDS)
        call = opened.call
        try:
            found = await self._until_ready(opened, partial(self._read_request, opened, handler, raw))
            if callable(found):
                last_step = partial(opened.run, partial(finish, call, found), self._apply_thread)
                return await self._until_ready(opened, last_step)
            return found
        finally:
            call.release()
            if call.identity is not None:
                self._waiters.pushed(call.identity)

    async def _read_request(self, opened: OpenCall, handler: Handler, raw: bytes | None) -> Answers | LastStep:
        """Send the messages of a request into a reader, each as it arrives; return what the reader ends with.

        While a thread works on a message of an upload, the next one is received, for a few uploads at a time.
        """
        call, reads_ahead = opened.call, opened.rule.reads_ahead and self._ahead < _MOST_AHEAD
        call.release()  # what an attempt has charged that had to wait
        self._ahead += reads_ahead
        reading = cast(_InParts, handler)(call)
        is_first, ahead = True, cast("asyncio.Future[Any] | None", None)
        try:
            next(reading)
            while True:
                size = 0 if raw is None else len(raw)
                if call.reservation is not None:
                    call.reservation.add(received_bytes(size))
                if reads_ahead and raw is not None:
                    ahead = asyncio.ensure_future(opened.context.read())
                    ahead.add_done_callback(fetch_error)
                arrived = call, reading, raw, time.perf_counter_ns()
                if opened.rule.has_last_step and size <= _SMALL_BYTES:
                    found = await opened.run(partial(feed_and_finish, *arrived), self._apply_thread)
                else:
                    found = await opened.run(partial(feed, *arrived))
                if found is not None:
                    return found
                raw, is_first = await self._read(opened, ahead=ahead), False
        except NotYetError as early:
            if is_first and ahead is None:
                raise
            raise early.refusal() from None  # the messages before are gone
        finally:
            self._ahead -= reads_ahead
            if ahead is not None:
                ahead.cancel()
            reading.close()

    async def _answer(self, opened: OpenCall, answers: Answers) -> None:
        """Send the answers to a request; while one batch is sent, a thread makes the next."""
        batch, others = answers
        if opened.call.finish is not None:
            await opened.run(opened.call.finish)
        making: asyncio.Task[Answers] | None = None
        try:
            while True:
                if others is not None:
                    making = asyncio.create_task(opened.run(partial(more, opened.call, others)))
                left = len(batch)
                for data in batch:
                    if opened.rule.lane is Lane.READ:
                        await self._read_turns.take()
                    left -= 1
                    opened.is_answered = others is None and not left
                    await self._wait(opened, opened.context.write(data), "reader")
                if making is None:
                    return
                (batch, others), making = await making, None
        finally:
            if making is not None:
                making.cancel()
                await asyncio.gather(making, return_exceptions=True)
            if others is not None:
                others.close()

    # Waiting for the client, and for threads

    async def _read(
        self, opened: OpenCall, seconds: float = math.inf, ahead: Awaitable[Any] | None = None
    ) -> bytes | None:
        """Return the client's next message, which is read ``ahead``; ``None`` at the end of its stream."""
        raw = await self._wait(opened, ahead or opened.context.read(), "request", seconds)
        self._silent.pop(opened, None)
        return None if raw is grpc.aio.EOF else raw

    async def _read_idle(self, opened: OpenCall) -> bytes | None:
        """Wait for the stream's next request, without a time limit while the worker has a lease.

        A newer stream of the same worker and call ends the older one.
        """
        identity = opened.call.identity
        if identity is None:
            return await self._read(opened)
        self._require_serving()
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._cut_abandoned())
        key = (opened.call.rpc, identity)
        if (other := self._idle.get(key)) is not None:
            other.cut("gave_way")
        self._idle[key], opened.is_idle = opened, True
        opened.started = opened.loop.time()
        try:
            raw = await opened.wait(opened.context.read(), math.inf, "")
        finally:
            opened.is_idle = False
            if self._idle.get(key) is opened:
                del self._idle[key]
        return None if raw is grpc.aio.EOF else raw

    async def _cut_abandoned(self) -> None:
        """End the idle streams of workers whose leases have ended."""
        while True:
            await asyncio.sleep(self._settings.stream_idle_seconds / 4)
            for opened in list(self._idle.values()):
                silent = opened.loop.time() - opened.started
                if silent > self._settings.stream_idle_seconds and not opened.call.has_lease():
                    opened.cut("idle_request")

    def _wait(
        self, opened: OpenCall, client: Awaitable[Result], what: str, seconds: float = math.inf
    ) -> Coroutine[Any, Any, Result]:
        """Wait for the client, within the limits; raises :class:`StalledError`."""
        idle = self._settings.stream_idle_seconds
        if seconds < idle:
            idle = seconds
        if self._stopping and idle > _STOP_SECONDS:
            idle = _STOP_SECONDS
        now, end = opened.loop.time(), opened.started + self._settings.stream_seconds
        until, why = (now + idle, f"idle_{what}") if now + idle <= end else (end, "too_long")
        return opened.wait(client, until, why)

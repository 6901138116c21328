"""The table of calls: who may make each, and which threads serve it; and one call as its handler knows the call."""

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError, Message

from pscore.telemetry import tracing
from pscore.telemetry.span import NO_SPAN, TraceSpan
from pscore.wire.dense import split_values
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.frames import FRAMING_BYTES
from pscore.wire.messages import place_of
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.awaiting import NotYetError
from psservice.memory_budget import Reservation
from psservice.rpc import bounds
from psservice.rpc.caller import Caller, Role
from psservice.rpc.charges import decoded_bytes
from psservice.settings import ServerSettings
from psservice.values import Identity

SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServerService"]
_REQUESTS: dict[str, type[Message]] = {method.name: getattr(pb, method.input_type.name) for method in SERVICE.methods}

_HAVE_HEADERS = frozenset(rpc for rpc, kind in _REQUESTS.items() if "header" in kind.DESCRIPTOR.fields_by_name)

Answer: TypeAlias = Message | Generator[Any, None, None]
"""One message, or those of a stream."""

LastStep: TypeAlias = Callable[[], Answer]
"""What is left of a request whose messages are read and decoded: a job for the thread of the parameters."""

StreamReader: TypeAlias = Generator[None, Any, Any]
"""Ends with an :data:`Answer`, or a :data:`LastStep`. See :mod:`psservice.state.stream_readers`."""

Handler: TypeAlias = "Callable[[Call, Any], Answer] | Callable[[Call], StreamReader]"
"""Answers the request of a call, or returns a reader of its stream."""


class Lane(Enum):
    """A pool of threads, so that no kind of call waits behind another; no thread ever waits for a client."""

    LEASE = "lease"
    JOIN = "join"
    OPERATOR = "operator"
    FINISH = "finish"
    READ = "read"
    STANDBY = "standby"
    WORK = "work"


@dataclass(frozen=True, slots=True)
class Rule:
    """How one method is served.

    Attributes:
        changes: whether the call changes the shard, so that a drain waits for it.
        in_parts: whether a request is several messages, for a reader of them.
        stays_open: whether a stream has one request after another.
        has_last_step: whether a reader of messages ends with a step for the thread of the parameters.
        reads_ahead: whether the next message is received while the handler works on one: of megabytes, and many.
        is_audited: whether the log has who called, and how that ended.
        serves_replaced: whether a shard serves it whose place a standby has taken; operators' calls are served too.
    """

    role: Role
    lane: Lane
    changes: bool = False
    in_parts: bool = False
    stays_open: bool = False
    has_last_step: bool = False
    reads_ahead: bool = False
    is_audited: bool = False
    serves_replaced: bool = False


RULES: dict[str, Rule] = {
    "Join": Rule(Role.WORKER, Lane.JOIN, changes=True),
    "RenewLease": Rule(Role.WORKER, Lane.LEASE),
    "Leave": Rule(Role.WORKER, Lane.JOIN),
    "UploadModel": Rule(Role.WORKER, Lane.WORK, changes=True, in_parts=True, reads_ahead=True),
    "DownloadModel": Rule(Role.READER, Lane.WORK),
    "AwaitCut": Rule(Role.READER, Lane.READ),
    "ReadCut": Rule(Role.READER, Lane.READ),
    "PushSparse": Rule(Role.WORKER, Lane.WORK, changes=True, in_parts=True, stays_open=True, has_last_step=True),
    "PullDiff": Rule(Role.WORKER, Lane.WORK, stays_open=True),
    "ExchangeBuffers": Rule(Role.WORKER, Lane.WORK, changes=True, in_parts=True),
    "LeaseSamples": Rule(Role.WORKER, Lane.WORK, changes=True),
    "WaitForAll": Rule(Role.WORKER, Lane.WORK),
    "Publish": Rule(Role.WORKER, Lane.WORK, changes=True),
    "FollowRun": Rule(Role.READER, Lane.LEASE),
    "GetStatus": Rule(Role.READER, Lane.OPERATOR),
    "FinishRun": Rule(Role.WORKER, Lane.FINISH, is_audited=True),  # of every worker that leaves; waits for a file
    "TakeSnapshot": Rule(Role.ADMIN, Lane.OPERATOR, is_audited=True),
    "ListCheckpoints": Rule(Role.READER, Lane.OPERATOR),
    "PinCheckpoint": Rule(Role.ADMIN, Lane.OPERATOR, is_audited=True),
    "DeleteCheckpoint": Rule(Role.ADMIN, Lane.OPERATOR, is_audited=True),
    "ReadCheckpoint": Rule(Role.ADMIN, Lane.OPERATOR, is_audited=True),
    "RestoreModel": Rule(Role.ADMIN, Lane.OPERATOR, is_audited=True),
    "Drain": Rule(Role.ADMIN, Lane.OPERATOR, is_audited=True),
    "EvictWorker": Rule(Role.ADMIN, Lane.OPERATOR, is_audited=True),
    "Replicate": Rule(Role.ADMIN, Lane.STANDBY, stays_open=True, serves_replaced=True),
    "Promote": Rule(Role.ADMIN, Lane.OPERATOR, is_audited=True),
}
"""Every method of the service; a test asserts that none is missing."""


@dataclass(slots=True)
class Call:
    """One request that is being served: a whole call, or one of a stream that stays open.

    Attributes:
        span: of the trace that the caller has begun.
        identity: the worker's; set by the handler, as the next four and the last two.
        has_lease: tells whether the worker has a lease still.
        wait_seconds: how long the answer may wait for a condition (:mod:`psservice.awaiting`).
        wait_end: when that time is over (by the loop's clock), 0 before it has begun; set by the dispatcher.
        is_late: whether that time is over; set by the dispatcher.
        finish: waits until the answer may be sent; ``None`` if it may be at once.
        reservation: the memory that a request of several messages occupies, until :meth:`release`.
        raw: the messages of the stream as they came, if an empty list is set.
        received_bytes: of all messages so far, as gRPC frames them.
        arrived_nanoseconds: when the message that the handler works on arrived (``perf_counter_ns``).
        values: of the message that the handler works on, as :func:`pscore.wire.dense.split_values` returns them.
        on_received: called with the bytes of messages of a stream before they are read.
        on_sent: called with the bytes of answers before they are sent.
        audit: what an audited call does, for the log; ``None`` if it changes nothing.
    """

    rpc: str
    caller: Caller
    span: TraceSpan = NO_SPAN
    identity: Identity | None = None
    has_lease: Callable[[], bool] = lambda: False
    wait_seconds: float = 0.0
    wait_end: float = 0.0
    is_late: bool = False
    finish: Callable[[], None] | None = None
    reservation: Reservation | None = None
    raw: list[bytes] | None = None
    received_bytes: int = 0
    arrived_nanoseconds: int = 0
    values: Sequence[memoryview] = ()
    on_received: Callable[[int], None] | None = None
    on_sent: Callable[[int], None] | None = None
    audit: dict[str, object] | None = None

    def release(self) -> None:
        """End the reservation, and count received bytes anew."""
        if self.reservation is not None:
            self.reservation.__exit__()
            self.reservation, self.received_bytes = None, 0


def handlers_of(calls: object) -> dict[str, Handler]:
    """Return an object's handlers by the call's name; ``push_sparse`` serves ``PushSparse``."""
    methods = {rpc: re.sub(r"(?<!^)(?=[A-Z])", "_", rpc).lower() for rpc in RULES}
    return {rpc: getattr(calls, method) for rpc, method in methods.items() if hasattr(calls, method)}


def parse(call: Call, raw: bytes) -> Message:
    """Parse and check one message of a call; raises :class:`Rejected`."""
    kind = _REQUESTS[call.rpc]
    if kind in (pb.PushSparseRequest, pb.UploadModelRequest):
        raw, call.values = split_values(raw, several=kind is pb.PushSparseRequest)
    bounds.require_few_fields(kind, raw)
    try:
        message = kind.FromString(raw)
    except DecodeError as error:
        raise Rejected(ErrorCode.BAD_REQUEST, f"a message is no {kind.__name__}") from error
    check(call, message)
    return message


def check(call: Call, message: Message) -> None:
    """Check what a message contains, that its caller may be the worker that it names, and the memory for its content.

    A message of a stream is charged here for what is decoded of it, before its reader has it. Raises :class:`Rejected`.
    """
    named: Any = message.header if call.rpc in _HAVE_HEADERS else message  # type: ignore[attr-defined]
    if call.span is NO_SPAN and (parent := getattr(named, "traceparent", "")):
        call.span = tracing.continued(call.rpc, parent)
    bounds.require(message)
    call.wait_seconds = getattr(named, "wait_seconds", 0.0) or call.wait_seconds  # later messages have no header
    if call.caller.worker and "identity" in named.DESCRIPTOR.fields_by_name and named.identity.worker_id:
        call.caller.require_worker(named.identity.worker_id)
    if call.reservation is not None:
        call.reservation.add(decoded_bytes(message))


def require_place(settings: ServerSettings, meant: str) -> None:
    """Refuse a call that is meant for another shard, which may have had this server's address a moment ago."""
    mine = place_of(settings.shard_index, settings.num_shards)
    if meant != mine:
        raise Rejected(
            ErrorCode.SHARD_MISMATCH, f"the caller takes this server for shard {meant[:32]}; it is shard {mine}"
        )


Answers: TypeAlias = tuple[list[bytes], Generator[Any, None, None] | None]
"""Serialized answers, and those that :func:`more` serializes; ``None`` if no more follow."""

ANSWER_BYTES = 1 << 20
"""Of messages that are written in one piece of work."""


def reply_to(call: Call, handler: Callable[[Call, Message], Answer], raw: bytes) -> Answers:
    """Answer a request of one message; raises :class:`Rejected`."""
    call.received_bytes = len(raw) + FRAMING_BYTES
    message = parse(call, raw)
    if call.span is NO_SPAN:
        return begin(call, handler(call, message))
    return call.span.run(begin, call, handler(call, message))


def feed(call: Call, reading: StreamReader, raw: bytes | None, arrived_nanoseconds: int) -> Answers | LastStep | None:
    """Send a message into a reader; return what the reader ends with, if it has ended."""
    try:
        if raw is None:
            reading.send(None)
            raise AssertionError("a reader must end where its stream ends")
        nbytes = len(raw) + FRAMING_BYTES
        call.received_bytes += nbytes
        call.arrived_nanoseconds = arrived_nanoseconds
        if call.on_received is not None:
            call.on_received(nbytes)
        if call.raw is not None:
            call.raw.append(raw)
        message = parse(call, raw)
        if call.span is NO_SPAN:
            reading.send(message)
        else:
            call.span.run(reading.send, message)
    except StopIteration as end:
        return end.value if callable(end.value) else begin(call, end.value)
    return None


def feed_and_finish(
    call: Call, reading: StreamReader, raw: bytes | None, arrived_nanoseconds: int
) -> Answers | LastStep | None:
    """Send a message into a reader, and take the last step if that was the last message and nothing has to wait."""
    found = feed(call, reading, raw, arrived_nanoseconds)
    try:
        return finish(call, found) if callable(found) else found
    except NotYetError:
        return found


def finish(call: Call, last_step: LastStep) -> Answers:
    """Take the last step of a request, and return its answers."""
    return begin(call, last_step() if call.span is NO_SPAN else call.span.run(last_step))


def more(call: Call, answers: Generator[Any, None, None]) -> Answers:
    """Serialize answers up to about a MiB."""
    batch, size = [], 0
    for message in answers:
        data = message if isinstance(message, bytes) else message.SerializeToString()
        batch.append(data)
        size += len(data)
        if size >= ANSWER_BYTES:
            break
    if call.on_sent is not None:
        call.on_sent(size + FRAMING_BYTES * len(batch))
    return batch, answers if size >= ANSWER_BYTES else None


def begin(call: Call, answer: Answer) -> Answers:
    """Serialize the first answers."""
    return ([answer.SerializeToString()], None) if isinstance(answer, Message) else more(call, answer)

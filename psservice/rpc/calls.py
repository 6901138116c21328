"""What the door knows of a call, and the table of calls: who may make each, and which threads serve it."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from google.protobuf.message import Message

from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.rpc.auth import Caller, Role
from psservice.rpc.memory_budget import Reservation

SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServerService"]

Answer: TypeAlias = Message | Iterator[Message]
"""One message, or those of a stream."""

Handler: TypeAlias = "Callable[[Call, Any], Answer] | Callable[[Call], StreamReader]"
"""Takes the request of a call, or returns a reader of its stream."""

StreamReader: TypeAlias = Generator[None, Any, Answer]
"""See :mod:`psservice.rpc.push_stream`."""


class Lane(Enum):
    """Threads of their own, so that no kind of call waits behind another; no thread ever waits for a client."""

    LEASE = "lease"
    JOIN = "join"
    OPERATOR = "operator"
    WORK = "work"


@dataclass(frozen=True, slots=True)
class Rule:
    """How one method is served.

    Attributes:
        role: the least that a caller needs.
        lane: whose threads.
        changes: whether it changes the shard, so that a drain waits for it.
    """

    role: Role
    lane: Lane
    changes: bool = False


RULES: dict[str, Rule] = {
    "Join": Rule(Role.WORKER, Lane.JOIN, changes=True),
    "RenewLease": Rule(Role.WORKER, Lane.LEASE),
    "Leave": Rule(Role.WORKER, Lane.JOIN),
    "UploadModel": Rule(Role.WORKER, Lane.WORK, changes=True),
    "DownloadModel": Rule(Role.READER, Lane.WORK),
    "PushSparse": Rule(Role.WORKER, Lane.WORK, changes=True),
    "PullDiff": Rule(Role.WORKER, Lane.WORK),
    "ExchangeBuffers": Rule(Role.WORKER, Lane.WORK, changes=True),
    "LeaseSamples": Rule(Role.WORKER, Lane.WORK, changes=True),
    "GetStatus": Rule(Role.READER, Lane.OPERATOR),
    "FinishRun": Rule(Role.WORKER, Lane.OPERATOR),  # workers tell the other shards of the end
    "TakeSnapshot": Rule(Role.ADMIN, Lane.OPERATOR),
    "ListCheckpoints": Rule(Role.READER, Lane.OPERATOR),
    "DeleteCheckpoint": Rule(Role.ADMIN, Lane.OPERATOR),
    "RestoreModel": Rule(Role.ADMIN, Lane.OPERATOR),
    "Drain": Rule(Role.ADMIN, Lane.OPERATOR),
    "EvictWorker": Rule(Role.ADMIN, Lane.OPERATOR),
}
"""Every method of the service; a test asserts that none is missing."""


@dataclass(slots=True)
class Call:
    """One call that is being served.

    Attributes:
        rpc: the method's name.
        caller: who calls.
        charge: the memory that a stream occupies; set by its handler.
        keeps_raw: whether a handler wants :attr:`raw`.
        raw: the messages of the stream as they came.
        received_bytes: of all messages so far, as gRPC frames them.
        arrived_nanoseconds: when the message in the handler's hands arrived (``perf_counter_ns``).
        on_received: told of the bytes of messages of a stream before they are read; set by the handler.
        on_sent: told of the bytes of answers before they are sent; set by the handler.
    """

    rpc: str
    caller: Caller
    charge: Reservation | None = None
    keeps_raw: bool = False
    raw: list[bytes] = field(default_factory=list)
    received_bytes: int = 0
    arrived_nanoseconds: int = 0
    on_received: Callable[[int], None] = lambda nbytes: None
    on_sent: Callable[[int], None] = lambda nbytes: None

"""Why a call is refused: the one table that binds a reason to a gRPC status and to advice, and its way over the wire.

The names are those of ``RefusalReason`` in the proto. The server raises :class:`Rejected` anywhere below its RPC layer,
which turns it into a status with ``google.rpc`` error details; the client reads them (``psclient.errors``). Neither
side names a status elsewhere.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import cast

import grpc
from google.protobuf import any as any_message
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from pscore.names import escaped

DOMAIN = "sparseps"
"""``domain`` of the ``google.rpc.ErrorInfo`` that carries a reason."""


_ANOTHER_RUN = "for another run start a server with another --data-dir, or without one"


class ErrorCode(Enum):
    """A reason, the name of its gRPC status code, and what to do about it."""

    BAD_CHUNK = ("INVALID_ARGUMENT", "the sender's encoder is broken; nothing was applied")
    BAD_COMMIT = ("INVALID_ARGUMENT", "the stream was cut, or its sender counts wrongly; nothing was applied")
    NON_FINITE = ("INVALID_ARGUMENT", "look for a diverging loss; nothing was applied")
    BAD_REQUEST = ("INVALID_ARGUMENT", "correct what the message names")
    UNKNOWN_CODEC = ("UNIMPLEMENTED", "choose a codec that this server knows, or upgrade it")
    UNKNOWN_PROTOCOL = (
        "UNIMPLEMENTED",
        "upgrade the older side to a release at most one behind the other, as docs/operate/upgrading.md says",
    )
    FINGERPRINT_MISMATCH = ("FAILED_PRECONDITION", f"build the same model on every worker; {_ANOTHER_RUN}")
    SETTINGS_MISMATCH = ("FAILED_PRECONDITION", f"give every worker the same method and settings; {_ANOTHER_RUN}")
    SHARD_MISMATCH = ("FAILED_PRECONDITION", "list every shard's address once, in the order of --shard-index")
    NOT_INITIALISED = ("FAILED_PRECONDITION", "start a worker, which uploads its model, or give the server --init")
    STALE_GENERATION = ("FAILED_PRECONDITION", "the model was uploaded anew; join again and pull")
    RUN_MISMATCH = ("FAILED_PRECONDITION", "the server serves another run; check its address and --run-id")
    RUN_FINISHED = ("FAILED_PRECONDITION", "the run is over; fetch the model with psclient.save or download")
    STEP_OUT_OF_ORDER = ("FAILED_PRECONDITION", "steps of one incarnation must rise")
    WORKER_ALIVE = ("ALREADY_EXISTS", "choose another worker id, or wait until the other's lease ends")
    ALREADY_UPLOADED = ("ALREADY_EXISTS", "another worker was first; join again and pull")
    LEASE_EXPIRED = ("NOT_FOUND", "join again with the same incarnation and repeat the call")
    VERSION_IN_FUTURE = ("OUT_OF_RANGE", "the replica belongs to another history; join again and pull everything")
    BUSY = ("RESOURCE_EXHAUSTED", "come back after the delay")
    UNAUTHENTICATED = ("UNAUTHENTICATED", "give the caller a token that the server's --tokens file has")
    PERMISSION_DENIED = (
        "PERMISSION_DENIED",
        "use a token or certificate of the role, or of the worker, that the call is for",
    )
    NOT_DURABLE = ("UNAVAILABLE", "come back after the delay; see to the server's disk (--data-dir) if it stays so")
    TOO_STALE = ("ABORTED", "give the update back to the residual, pull, and go on")
    TOO_FAR_AHEAD = ("RESOURCE_EXHAUSTED", "come back after the delay; slower workers catch up meanwhile")
    ROUND_OPEN = ("RESOURCE_EXHAUSTED", "come back after the delay; the round waits for other workers")
    DRAINING = ("UNAVAILABLE", "wait until the server is back, or until `psservice drain --undo`")
    EVICTED = ("PERMISSION_DENIED", "retry after the delay; an unanswered push is sent again under the same identity")
    NO_SUCH_WORKER = ("NOT_FOUND", "look at `psservice workers` for the names")
    NO_SUCH_CHECKPOINT = ("NOT_FOUND", "look at `psservice checkpoint list` for those there are")
    NO_SUCH_CUT = ("NOT_FOUND", "ask for the newest cut, and read that")
    STANDBY = ("UNAVAILABLE", "go to the server that it stands by for, or have it serve with `psservice promote`")
    REPLACED = (
        "UNAVAILABLE",
        "go to the standby that has taken its place; keep this one stopped, and begin a standby anew in its place",
    )
    STANDBY_AHEAD = (
        "FAILED_PRECONDITION",
        "have the standby serve (psservice promote), or start it with an empty --data-dir if that part is not wanted",
    )
    NO_STANDBY = ("UNAVAILABLE", "come back after the delay; see to the standby, or serve without --replicate ack")
    RELAY_RING = ("FAILED_PRECONDITION", "give --of a server that trains or publishes, or a relay that leads to one")

    def __init__(self, status_name: str, advice: str) -> None:
        self.status_name = status_name
        self.advice = advice

    @property
    def wire_name(self) -> str:
        """Name in the proto's ``RefusalReason``."""
        return f"REFUSAL_REASON_{self.name}"

    @classmethod
    def from_wire_name(cls, wire_name: str) -> "ErrorCode | None":
        """Return the reason with this wire name; ``None`` if this version does not know the reason."""
        return cls.__members__.get(wire_name.removeprefix("REFUSAL_REASON_"))


class Rejected(Exception):  # noqa: N818 - the protocol's word: the raising side has no fault
    """A call is refused. The model has not changed, unless the reason is ``NOT_DURABLE``.

    Attributes:
        detail: what exactly was wrong, for a person.
        metadata: machine-readable particulars, for instance ``{"tensor": "fc.weight"}``.
        retry_seconds: delay before the next attempt, for back-pressure.
    """

    def __init__(self, reason: ErrorCode, detail: str, *, retry_seconds: float | None = None, **metadata: str) -> None:
        super().__init__(f"{detail} ({reason.name}: {reason.advice})")
        self.reason = reason
        self.detail = detail
        self.metadata = metadata
        self.retry_seconds = retry_seconds


@dataclass(frozen=True, slots=True)
class Details:
    """The details of a failed call; no reason if the call was not refused, or this version does not know the reason.

    Unprintable characters of the metadata are escaped.
    """

    reason: ErrorCode | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    retry_seconds: float | None = None


def to_status(refusal: Rejected) -> grpc.Status:
    """Return the status of a refused call."""
    details = [any_message.pack(ErrorInfo(reason=refusal.reason.wire_name, domain=DOMAIN, metadata=refusal.metadata))]
    if refusal.retry_seconds is not None:
        delay = Duration()
        delay.FromNanoseconds(int(refusal.retry_seconds * 1e9))
        details.append(any_message.pack(RetryInfo(retry_delay=delay)))
    code = grpc.StatusCode[refusal.reason.status_name]
    return rpc_status.to_status(Status(code=code.value[0], message=str(refusal), details=details))


def details_of(error: grpc.RpcError) -> Details:
    """Return what :func:`to_status` has put into a failed call; nothing if another side ended it."""
    status = rpc_status.from_call(cast(grpc.Call, error))
    reason, metadata, retry_seconds = None, {}, None
    for detail in status.details if status is not None else ():
        info, retry = ErrorInfo(), RetryInfo()
        if detail.Is(ErrorInfo.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
            reason = ErrorCode.from_wire_name(info.reason)
            metadata = {name: escaped(value) for name, value in info.metadata.items()}
        elif detail.Is(RetryInfo.DESCRIPTOR) and detail.Unpack(retry):
            retry_seconds = retry.retry_delay.ToNanoseconds() / 1e9
    return Details(reason, metadata, retry_seconds)

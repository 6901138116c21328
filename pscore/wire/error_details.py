"""A refusal as a gRPC status and back: a reason and when to come back travel as ``google.rpc`` error details."""

from dataclasses import dataclass, field
from typing import cast

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from pscore.names import escaped
from pscore.wire.errors import DOMAIN, ErrorCode, Rejected


@dataclass(frozen=True, slots=True)
class Details:
    """What came with a failed call.

    Attributes:
        reason: ``None`` where it is no refusal, or one that this version does not know.
        metadata: of the reason, escaped where it could not be shown.
        retry_seconds: when to come back, where that was said.
    """

    reason: ErrorCode | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    retry_seconds: float | None = None


def to_status(refusal: Rejected) -> grpc.Status:
    """Return what a call ends with that is refused."""
    details = [_packed(ErrorInfo(reason=refusal.reason.wire_name, domain=DOMAIN, metadata=refusal.metadata))]
    if refusal.retry_seconds is not None:
        delay = Duration()
        delay.FromNanoseconds(int(refusal.retry_seconds * 1e9))
        details.append(_packed(RetryInfo(retry_delay=delay)))
    code = grpc.StatusCode[refusal.reason.status_name]
    return rpc_status.to_status(Status(code=code.value[0], message=str(refusal), details=details))


def from_error(error: grpc.RpcError) -> Details:
    """Return what :func:`to_status` has put into a failed call; nothing where another side ended it."""
    status = rpc_status.from_call(cast(grpc.Call, error))
    reason: ErrorCode | None = None
    metadata: dict[str, str] = {}
    retry_seconds: float | None = None
    for detail in status.details if status is not None else ():
        info, retry = ErrorInfo(), RetryInfo()
        if detail.Is(ErrorInfo.DESCRIPTOR) and detail.Unpack(info) and info.domain == DOMAIN:
            reason, metadata = (
                ErrorCode.from_wire_name(info.reason),
                {name: escaped(value) for name, value in info.metadata.items()},
            )
        elif detail.Is(RetryInfo.DESCRIPTOR) and detail.Unpack(retry):
            retry_seconds = retry.retry_delay.ToNanoseconds() / 1e9
    return Details(reason, metadata, retry_seconds)


def _packed(message: ErrorInfo | RetryInfo) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed

"""Values that several rooms exchange."""

from dataclasses import dataclass, field
from typing import NamedTuple

from pscore.names import LONGEST_NAME, is_name
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb


class Identity(NamedTuple):
    """A worker's name, and the UUID of one life of the process behind that name."""

    worker_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class PushAnswer:
    """The answer to a push; kept for repeats of that push."""

    version: int
    staleness: int
    apply_nanoseconds: int = field(compare=False)


def require_name(what: str, text: str, longest: int = LONGEST_NAME) -> None:
    """Check a text that a client has chosen; raises :class:`Rejected` (``BAD_REQUEST``)."""
    if not is_name(text, longest):
        raise Rejected(ErrorCode.BAD_REQUEST, f"{what} must be 1 to {longest} printable characters")


def identity_to_message(identity: Identity) -> pb.WorkerIdentity:
    """Write an identity without its run, as records have it."""
    return pb.WorkerIdentity(worker_id=identity.worker_id, incarnation=identity.incarnation)


def identity_from_message(message: pb.WorkerIdentity) -> Identity:
    """Read an identity."""
    return Identity(message.worker_id, message.incarnation)

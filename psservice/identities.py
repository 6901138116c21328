"""Names and identities in messages: read, written and checked in one place."""

from pscore.reasons import Reason, Refusal
from pscore.v1 import parameter_server_pb2 as pb
from psservice.membership import Identity

_LONGEST_NAME = 256


def require_name(what: str, text: str) -> None:
    """Check a name that a client has chosen; raises :class:`Refusal` (``BAD_REQUEST``)."""
    if not text or len(text) > _LONGEST_NAME or not text.isprintable():
        raise Refusal(Reason.BAD_REQUEST, f"{what} must be 1 to {_LONGEST_NAME} printable characters")


def identity_to_message(identity: Identity) -> pb.WorkerIdentity:
    """Write an identity, as records have it: without the run."""
    return pb.WorkerIdentity(worker_id=identity.worker_id, incarnation=identity.incarnation)


def identity_from_message(message: pb.WorkerIdentity) -> Identity:
    """Read one."""
    return Identity(message.worker_id, message.incarnation)

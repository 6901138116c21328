"""The records of a shard, each written to the journal before the event that the record describes."""

import logging
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import cast

from google.protobuf.message import Message

from pscore.telemetry.tracing import traced
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.model.wagma.group_rounds import Decision
from psservice.sampling.codec import record_of
from psservice.sampling.dataset import Leased, SampleRequest
from psservice.storage.files import StorageError
from psservice.storage.journal import Journal
from psservice.storage.journal_format import Body
from psservice.types import Identity
from psservice.wire.identity import identity_to_message

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_RETRY_SECONDS = 1.0


class Kind(IntEnum):
    """Kinds of records; docs/operate/durability.md has their bodies."""

    PUSHED = 1
    AVERAGED = 2
    JOINED = 3
    LEFT = 4
    FINISHED = 5
    ROUND = 6
    GROUPS = 7
    KNOWN = 8
    LEASED = 10


def body_of(*messages: Message | bytes, behind: Body | None = None) -> Body:
    """Add messages, or their bytes, to a body, each behind its length (uint32)."""
    parts = []
    for message in messages:
        data = message if isinstance(message, bytes) else message.SerializeToString()
        parts += [_LENGTH.pack(len(data)), data]
    return (behind or Body()).with_parts(*parts)


def messages_in(body: bytes) -> list[bytes]:
    """Return the messages of a body; raises ``ValueError`` where the lengths do not fit."""
    found, position = [], 0
    while position < len(body):
        start = position + _LENGTH.size
        if start > len(body):
            raise ValueError("a length is cut")
        position = start + _LENGTH.unpack_from(body, start - _LENGTH.size)[0]
        if position > len(body):
            raise ValueError("a message is cut")
        found.append(body[start:position])
    return found


@contextmanager
def or_not_durable() -> Iterator[None]:
    """Refuse a call (``NOT_DURABLE``) that cannot be written down."""
    try:
        yield
    except StorageError as error:
        raise Rejected(ErrorCode.NOT_DURABLE, str(error), retry_seconds=_RETRY_SECONDS) from error


class EventLog:
    """Writes the records of a running shard. Without a journal, every call does nothing.

    Each method raises :class:`Rejected` (``NOT_DURABLE``) where the record cannot be written. ``journal`` is ``None``
    before the recovery has ended, and where no journal is kept.
    """

    journal: Journal | None = None

    def push_body(self, messages: Sequence[bytes]) -> Body | None:
        """Prepare the messages of a push for :meth:`pushed`, beside the apply thread."""
        return None if self.journal is None else body_of(*messages)

    def pushed(self, body: Body | None, version: int, staleness: int, applied_scale: float) -> None:
        """Write a push and its answer, before it is applied. A replay repeats a refusal by the model."""
        if body is not None:
            response = pb.PushSparseResponse(version=version, staleness=staleness, applied_scale=applied_scale)
            self._append(Kind.PUSHED, body_of(response, behind=body))

    def averaged(self, identity: Identity, step: int, samples: int, data: bytes, live_workers: int) -> None:
        """Write an exchange of buffers."""
        header = pb.BuffersHeader(
            identity=identity_to_message(identity), step=step, samples=samples, buffer_bytes=len(data)
        )
        response = pb.RenewLeaseResponse(live_workers=live_workers)
        self._append(Kind.AVERAGED, body_of(header, pb.BytesChunk(data=data), response))

    def joined(self, identity: Identity, index_codecs: frozenset[int]) -> None:
        """Write a lease."""
        codecs = [cast("pb.IndexCodec.ValueType", codec) for codec in sorted(index_codecs)]
        self._append(Kind.JOINED, body_of(pb.JoinRequest(identity=identity_to_message(identity), index_codecs=codecs)))

    def leased(self, identity: Identity, request: SampleRequest, leased: Leased) -> None:
        """Write a lease of samples."""
        self._append(Kind.LEASED, body_of(*record_of(identity, request, leased)))

    def left(self, identity: Identity) -> None:
        """Write the end of a lease; where that fails, the lease ends once more after a restart."""
        try:
            self._append(Kind.LEFT, body_of(pb.LeaveRequest(identity=identity_to_message(identity))))
        except Rejected as error:
            log.warning("the end of a lease is not written down", extra={"error": str(error)})

    def known(self, shards: Sequence[pb.ShardHistory]) -> None:
        """Write what is known of other shards; where that fails, it is known until the next restart."""
        try:
            self._append(Kind.KNOWN, body_of(*shards))
        except Rejected as error:
            log.warning("what is known of other shards is not written down", extra={"error": str(error)})

    def finished(self, run_id: str) -> None:
        """Write the run's end."""
        self._append(Kind.FINISHED, body_of(pb.FinishRunRequest(run_id=run_id)))

    def closed_round(self, version: int) -> None:
        """Write that a round is closed."""
        self._append(Kind.ROUND, body_of(pb.PushSparseResponse(version=version)))

    def decided(self, decision: Decision) -> None:
        """Write a decision of the groups."""
        self._append(Kind.GROUPS, Body().with_parts(decision.to_bytes()))

    @property
    def must_wait(self) -> bool:
        """Whether :meth:`wait` may wait for a disk."""
        return self.journal is not None and self.journal.waits

    @traced("durable")
    def wait(self) -> None:
        """Wait until every record that was written before this call is as durable as the mode promises."""
        if self.journal is not None:
            with or_not_durable():
                self.journal.wait()

    @traced("journal")
    def _append(self, kind: Kind, body: Body) -> None:
        if self.journal is not None:
            with or_not_durable():
                self.journal.append(kind, body)

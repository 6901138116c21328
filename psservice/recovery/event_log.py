"""The records of a shard, each written to the journal before what it says is done."""

import logging
from collections.abc import Sequence
from typing import cast

from pscore.telemetry.tracing import traced
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.model.wagma.rounds import Decision
from psservice.recovery.records import Kind, add_messages, body_of
from psservice.sampling.codec import record_of
from psservice.sampling.dataset import Leased, SampleRequest
from psservice.storage.datadir import DataDir
from psservice.storage.files import StorageError
from psservice.storage.journal import JournalError
from psservice.storage.journal_format import Body
from psservice.types import Identity, PushAnswer
from psservice.wire.identity import identity_to_message

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0


class EventLog:
    """The records of a running shard. Without a journal, every call does nothing.

    Each method that writes raises :class:`Rejected` (``NOT_DURABLE``) where the record cannot be written.

    Args:
        data_dir: ``None`` for none.
    """

    def __init__(self, data_dir: DataDir | None) -> None:
        self._dir = data_dir

    @property
    def keeps_journal(self) -> bool:
        """Whether there is a journal."""
        return self._dir is not None and self._dir.keeps_journal

    def written(self, messages: Sequence[bytes]) -> Body | None:
        """Prepare the messages of a push for :meth:`pushed`, beside the writer."""
        return body_of(*messages) if self.keeps_journal else None

    def pushed(self, body: Body | None, answer: PushAnswer) -> None:
        """Write a push, before it is applied. A replay repeats a refusal by the model."""
        if body is not None:
            response = pb.PushSparseResponse(
                version=answer.version, staleness=answer.staleness, applied_scale=answer.applied_scale
            )
            self._append(Kind.PUSHED, add_messages(body, response))

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
        """Write which samples a worker is given."""
        self._append(Kind.LEASED, body_of(*record_of(identity, request, leased)))

    def left(self, identity: Identity) -> None:
        """Write the end of a lease; where that fails, the lease ends once more after a restart."""
        try:
            self._append(Kind.LEFT, body_of(pb.LeaveRequest(identity=identity_to_message(identity))))
        except Rejected as error:
            log.warning("the end of a lease is not written down", extra={"error": str(error)})

    def finished(self, run_id: str) -> None:
        """Write the run's end."""
        self._append(Kind.FINISHED, body_of(pb.FinishRunRequest(run_id=run_id)))

    def closed_round(self, version: int) -> None:
        """Write that a round is closed, before it is."""
        self._append(Kind.ROUND, body_of(pb.PushSparseResponse(version=version)))

    def decided(self, decision: Decision) -> None:
        """Write what happens in the groups, before it does."""
        self._append(Kind.GROUPS, Body.of([decision.to_bytes()]))

    @traced("durable")
    def wait(self) -> None:
        """Wait until everything that was written before this call is as durable as was promised."""
        if self._dir is not None and self._dir.journal is not None:
            try:
                self._dir.journal.wait()
            except JournalError as error:
                raise not_durable(error) from error

    @traced("journal")
    def _append(self, kind: Kind, body: Body) -> None:
        if self._dir is not None and self._dir.journal is not None:
            try:
                self._dir.journal.append(kind, body)
            except JournalError as error:
                raise not_durable(error) from error


def not_durable(error: StorageError) -> Rejected:
    """Return what a call is refused with that cannot be written down."""
    return Rejected(ErrorCode.NOT_DURABLE, str(error), retry_seconds=_RETRY_SECONDS)

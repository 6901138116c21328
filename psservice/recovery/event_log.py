"""What happens to a shard, written to its journal one by one, each before it is done."""

import logging
from collections.abc import Sequence
from typing import cast

from pscore.telemetry.tracing import traced
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.model.wagma.rounds import Decision
from psservice.recovery.replayer import (
    AVERAGED,
    FINISHED,
    GROUPS,
    JOINED,
    LEASED,
    LEFT,
    PUSHED,
    ROUND,
    add_message,
    body_of,
    body_of_raw,
)
from psservice.rpc.identity import identity_to_message
from psservice.sampling.codec import record_of
from psservice.sampling.dataset import Leased, Wish
from psservice.storage.datadir import Store
from psservice.storage.files import StorageError
from psservice.storage.journal import JournalError
from psservice.storage.journal_format import Body
from psservice.types import Identity, PushAnswer

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0


class EventLog:
    """The records of a running shard. Without a journal, every call does nothing.

    Args:
        store: the data directory; ``None`` for none.
    """

    def __init__(self, store: Store | None) -> None:
        self._store = store

    @property
    def keeps_journal(self) -> bool:
        """Whether there is a journal."""
        return self._store is not None and self._store.keeps_journal

    def written(self, messages: Sequence[bytes]) -> Body | None:
        """Prepare the messages of a push for :meth:`pushed`, beside the writer."""
        return body_of_raw(messages) if self.keeps_journal else None

    def pushed(self, body: Body | None, answer: PushAnswer) -> None:
        """Write a push down, before it is applied. If it is refused then, the next life refuses it again.

        Raises:
            Refusal: ``NOT_DURABLE``.
        """
        if body is not None:
            said = pb.PushSparseResponse(
                version=answer.version, staleness=answer.staleness, applied_scale=answer.applied_scale
            )
            self._append(PUSHED, add_message(body, said))

    def averaged(self, identity: Identity, step: int, samples: int, data: bytes, live_workers: int) -> None:
        """Write an exchange of buffers down; raises :class:`Rejected` (``NOT_DURABLE``)."""
        if self.keeps_journal:
            header = pb.BuffersHeader(
                identity=identity_to_message(identity), step=step, samples=samples, buffer_bytes=len(data)
            )
            said = pb.RenewLeaseResponse(live_workers=live_workers)
            self._append(AVERAGED, body_of([header, pb.BytesChunk(data=data), said]))

    def joined(self, identity: Identity, index_codecs: frozenset[int]) -> None:
        """Write a lease down; raises :class:`Rejected` (``NOT_DURABLE``)."""
        if self.keeps_journal:
            codecs = [cast("pb.IndexCodec.ValueType", codec) for codec in sorted(index_codecs)]
            self._append(JOINED, body_of([pb.JoinRequest(identity=identity_to_message(identity), index_codecs=codecs)]))

    def leased(self, identity: Identity, wish: Wish, leased: Leased) -> None:
        """Write down that samples are handed out; raises :class:`Rejected` (``NOT_DURABLE``)."""
        if self.keeps_journal:
            self._append(LEASED, body_of(record_of(identity, wish, leased)))

    def left(self, identity: Identity) -> None:
        """Write the end of a lease down; where that fails, the lease ends once more after a restart."""
        if self.keeps_journal:
            try:
                self._append(LEFT, body_of([pb.LeaveRequest(identity=identity_to_message(identity))]))
            except Rejected as error:
                log.warning("the end of a lease is not written down", extra={"error": str(error)})

    def finished(self, run_id: str) -> None:
        """Write the run's end down; raises :class:`Rejected` (``NOT_DURABLE``)."""
        if self.keeps_journal:
            self._append(FINISHED, body_of([pb.FinishRunRequest(run_id=run_id)]))

    def closed_round(self, version: int) -> None:
        """Write down that a round is closed, before it is; raises :class:`Rejected` (``NOT_DURABLE``)."""
        if self.keeps_journal:
            self._append(ROUND, body_of([pb.PushSparseResponse(version=version)]))

    def decided(self, decision: Decision) -> None:
        """Write down what happens in the groups, before it does; raises :class:`Rejected` (``NOT_DURABLE``)."""
        if self.keeps_journal:
            self._append(GROUPS, Body.of([decision.to_bytes()]))

    @traced("durable")
    def wait(self) -> None:
        """Wait until everything that was written before this call is as durable as was promised.

        Raises:
            Refusal: ``NOT_DURABLE``.
        """
        if self._store is None:
            return
        try:
            self._store.wait()
        except JournalError as error:
            raise not_durable(error) from error

    @traced("journal")
    def _append(self, kind: int, body: Body) -> None:
        assert self._store is not None
        try:
            self._store.append(kind, body)
        except JournalError as error:
            raise not_durable(error) from error


def not_durable(error: StorageError) -> Rejected:
    """Return what a call is refused with that cannot be written down."""
    return Rejected(ErrorCode.NOT_DURABLE, str(error), retry_seconds=_RETRY_SECONDS)

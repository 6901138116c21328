"""The records of a running shard, on their way to the journal."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pscore.telemetry.tracing import traced
from pscore.wire.errors import ErrorCode, Rejected
from psservice.durability.replication import Replication
from psservice.state.records import Record, body_of, kind_of
from psservice.storage.files import StorageError
from psservice.storage.journal import Journal
from psservice.storage.journal_format import EMPTY, Body

_RETRY_SECONDS = 1.0


@contextmanager
def or_not_durable() -> Iterator[None]:
    """Refuse a call (``NOT_DURABLE``) that cannot be written down."""
    try:
        yield
    except StorageError as error:
        raise Rejected(ErrorCode.NOT_DURABLE, str(error), retry_seconds=_RETRY_SECONDS) from error


class RecordLog:
    """Writes records. Without a journal, every call does nothing.

    ``journal`` is ``None`` before the recovery has ended, and if no journal is kept. ``on_append`` is called after each
    record, on the apply thread, and must not wait.
    """

    journal: Journal | None = None

    def __init__(self, replication: Replication, on_append: Callable[[], None]) -> None:
        self._replication, self._on_append = replication, on_append

    @property
    def must_wait(self) -> bool:
        """Whether :meth:`wait` may wait for a disk or a standby."""
        return self.journal is not None and (self.journal.waits or self._replication.is_required)

    def body(self, messages: Sequence[bytes]) -> Body:
        """Prepare the messages of a push for :meth:`append`, beside the apply thread."""
        return EMPTY if self.journal is None else body_of(messages)

    @traced("journal")
    def append(self, record: Record, messages: Body = EMPTY) -> None:
        """Write a record, on the apply thread; raises :class:`Rejected` (``NOT_DURABLE``) if it cannot be written."""
        if self.journal is not None:
            with or_not_durable():
                self.journal.append(kind_of(record), body_of([record.SerializeToString()], messages))
            self._on_append()

    @traced("durable")
    def wait(self) -> None:
        """Wait until every record that was written before this call is as durable as the modes promise.

        Raises :class:`Rejected`: ``NOT_DURABLE``, or ``NO_STANDBY``.
        """
        if self.journal is not None:
            written = self.journal.position
            with or_not_durable():
                self.journal.wait()
            self._replication.wait(written)

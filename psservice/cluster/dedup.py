"""The last push of each incarnation, also after its lease: a repeat gets the first answer and is applied once."""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from psservice.cluster.leases import Leases
from psservice.policy.staleness import OwnVersions
from psservice.types import Identity, PushAnswer

MOST_RECORDS = 4096
"""Records without a lease that are kept; beyond that number the least recently used go."""

RECORD_SECONDS = 24 * 3600.0
"""How long a record without a lease is kept."""


@dataclass(slots=True)
class PushRecord:
    """One incarnation's record, for the apply thread; ``used`` is the last use by the clock of leases."""

    step: int = 0
    answer: PushAnswer | None = None
    buffer_step: int = 0
    own: OwnVersions = field(default_factory=OwnVersions)
    used: float = field(default=0.0, compare=False)


class Dedup:
    """The records of a shard, least recently used first; one with a lease is never dropped. Thread-safe."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._records: OrderedDict[Identity, PushRecord] = OrderedDict()
        self._last_pushes: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._lock = threading.RLock()

    def record(self, identity: Identity) -> PushRecord:
        """Return an incarnation's record, a new one where there is none."""
        with self._lock:
            record = self._records.get(identity)
            if record is None:
                self.drop_old()
                record = self._records[identity] = PushRecord()
            record.used = self._leases.clock()
            self._records.move_to_end(identity)
            return record

    def remember_push(self, identity: Identity, step: int, answer: PushAnswer, own: OwnVersions) -> None:
        """Record a push that was applied."""
        with self._lock:
            record = self.record(identity)
            record.step, record.answer, record.own = step, answer, own
            self._last_pushes[identity.worker_id] = (identity.incarnation, step)
            self._last_pushes.move_to_end(identity.worker_id)

    def last_push(self, worker_id: str) -> tuple[str, int] | None:
        """Return (incarnation, step) of the last push that was applied under a worker's name."""
        with self._lock:
            return self._last_pushes.get(worker_id)

    def remembered(self) -> tuple[list[tuple[Identity, PushRecord]], list[tuple[str, tuple[str, int]]]]:
        """Return copies of all records, and the last push by worker name; least recent first."""
        with self._lock:
            self.drop_old()
            return [(identity, replace(record)) for identity, record in self._records.items()], list(
                self._last_pushes.items()
            )

    def restore(self, records: Mapping[Identity, PushRecord], last_pushes: Mapping[str, tuple[str, int]]) -> None:
        """Replace everything with the records from before a restart."""
        with self._lock:
            now = self._leases.clock()
            self._records = OrderedDict((known, replace(record, used=now)) for known, record in records.items())
            self._last_pushes = OrderedDict(
                (name, push) for name, push in last_pushes.items() if Identity(name, push[0]) in self._records
            )
            self.drop_old()

    def drop_old(self) -> None:
        """Drop records without a lease that are too old or too many."""
        with self._lock:
            oldest = self._leases.clock() - RECORD_SECONDS
            while self._records:
                identity, record = next(iter(self._records.items()))
                if record.used > oldest and len(self._records) <= MOST_RECORDS + len(self._leases):
                    return
                if self._leases.is_live(identity):
                    self.record(identity)
                    continue
                del self._records[identity]
                if self._last_pushes.get(identity.worker_id, ("", 0))[0] == identity.incarnation:
                    del self._last_pushes[identity.worker_id]

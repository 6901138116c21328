"""The last push of each incarnation, also after its lease: a repeat gets the first answer and is applied once."""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field

from pscore.wire.errors import ErrorCode, Rejected
from psservice.values import Identity, PushAnswer

_SMOOTHING = 0.1
_MOST_RUNS = 1024  # of a worker that others interrupt so often without a pull; beyond, its oldest count as others'


def smoothed(before: float, seconds: float) -> float:
    """Return a worker's mean time between pushes after one more (seconds; 0 before the first)."""
    return seconds if not before else before + _SMOOTHING * (seconds - before)


@dataclass(frozen=True, slots=True)
class OwnVersions:
    """The versions of a generation that a worker's own pushes have made since the base of the last one.

    ``runs`` has the first and last of neighbouring versions, ascending.
    """

    generation: int = 0
    runs: tuple[tuple[int, int], ...] = ()

    def since(self, generation: int, base: int) -> int:
        """Count those above a base version."""
        if generation != self.generation:
            return 0
        return sum(last - max(first - 1, base) for first, last in self.runs if last > base)

    def noted(self, generation: int, base: int, version: int) -> "OwnVersions":
        """Add a version, and drop those up to the base of its push: a later push has no older base."""
        runs = [(first, last) for first, last in self.runs if last > base] if generation == self.generation else []
        if runs and runs[-1][1] == version - 1:
            runs[-1] = (runs[-1][0], version)
        else:
            runs.append((version, version))
        return OwnVersions(generation, tuple(runs[-_MOST_RUNS:]))


MOST_RECORDS = 4096
"""Records without a lease that are kept; beyond that number the least recent go."""

RECORD_SECONDS = 24 * 3600.0
"""How long a record without a lease is kept."""


@dataclass(slots=True)
class PushRecord:
    """One incarnation's record; ``used`` is the last change, by the clock of the records."""

    step: int = 0
    answer: PushAnswer | None = None
    buffer_step: int = 0
    own: OwnVersions = field(default_factory=OwnVersions)
    used: float = field(default=0.0, compare=False)


class Pushes:
    """The records of a shard, least recent first. Changed on the apply thread; other threads may read one record.

    ``seconds`` is the clock of the records.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._records: OrderedDict[Identity, PushRecord] = OrderedDict()
        self._last: OrderedDict[str, tuple[str, int]] = OrderedDict()

    def find(self, identity: Identity) -> PushRecord:
        """Return an incarnation's record; one without a push if there is none."""
        return self._records.get(identity) or PushRecord()

    def answered(self, identity: Identity, step: int) -> PushAnswer | None:
        """Return the first answer to a push that was applied; ``None`` for a new push.

        Raises :class:`Rejected` (``STEP_OUT_OF_ORDER``) if a later push was applied.
        """
        record = self.find(identity)
        if step < record.step:
            raise Rejected(ErrorCode.STEP_OUT_OF_ORDER, f"step {step} comes after step {record.step} was applied")
        return record.answer if step == record.step else None

    def last(self, worker_id: str) -> tuple[str, int] | None:
        """Return (incarnation, step) of the last push that was applied under a worker's name."""
        return self._last.get(worker_id)

    def add(self, identity: Identity, record: PushRecord) -> None:
        """Put a record behind all others, as a snapshot has it."""
        record.used = self._seconds()
        self._records[identity] = record
        self._records.move_to_end(identity)

    def note_last(self, worker_id: str, incarnation: str, step: int) -> None:
        """Note the last push under a name, as a snapshot has it."""
        if Identity(worker_id, incarnation) in self._records:
            self._last[worker_id] = (incarnation, step)
            self._last.move_to_end(worker_id)

    def push(self, identity: Identity, step: int, answer: PushAnswer, own: OwnVersions) -> None:
        """Note a push that was applied."""
        record = self.find(identity)
        record.step, record.answer, record.own = step, answer, own
        self.add(identity, record)
        self.note_last(identity.worker_id, identity.incarnation, step)

    def exchange(self, identity: Identity, step: int) -> None:
        """Note the step of an exchange of buffers."""
        record = self.find(identity)
        record.buffer_step = step
        self.add(identity, record)

    def forget(self, identities: Iterable[Identity]) -> None:
        """Drop records."""
        for identity in identities:
            self._records.pop(identity, None)
            if self._last.get(identity.worker_id, ("", 0))[0] == identity.incarnation:
                del self._last[identity.worker_id]

    def old(self, live: Container[Identity]) -> list[Identity]:
        """Return whose records are too old or too many, and have no lease."""
        without = [identity for identity in self._records if identity not in live]
        too_many, oldest = len(without) - MOST_RECORDS, self._seconds() - RECORD_SECONDS
        return [each for i, each in enumerate(without) if i < too_many or self._records[each].used <= oldest]

    def items(self) -> Iterator[tuple[Identity, PushRecord]]:
        """Yield all records, least recent first; on the apply thread."""
        yield from self._records.items()

    def last_pushes(self) -> dict[str, tuple[str, int]]:
        """Return the last push by worker name, least recent first; on the apply thread."""
        return dict(self._last)

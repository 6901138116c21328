"""The workers that have a lease, as far as the journal knows them: their clocks, and the wait for all of them."""

from collections.abc import Iterator
from dataclasses import dataclass

from psservice.values import Identity


@dataclass(slots=True)
class Worker:
    """A worker that has a lease, as later versions depend on it.

    Attributes:
        index_codecs: those that the worker reads.
        clock: pushes since the worker joined, counted from the lowest clock at that time.
        wait: number of the wait for all others in which the worker is; 0 while it trains (docs/reference/protocol.md).
        last_wait: number of the last wait that is over.
    """

    identity: Identity
    index_codecs: frozenset[int] = frozenset()
    clock: int = 0
    wait: int = 0
    last_wait: int = 0


class Workers:
    """The workers by name. Changed on the apply thread; other threads may read."""

    def __init__(self) -> None:
        self._by_name: dict[str, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter([*self._by_name.values()])

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, identity: Identity) -> Worker | None:
        """Return a worker; ``None`` if this life of it has no lease."""
        worker = self._by_name.get(identity.worker_id)
        return worker if worker is not None and worker.identity == identity else None

    def add(self, worker: Worker) -> None:
        """Put a worker back, as a snapshot has it."""
        self._by_name[worker.identity.worker_id] = worker

    def join(self, identity: Identity, index_codecs: frozenset[int]) -> None:
        """Add a worker, or replace its former life, at the clock of the slowest: nobody waits for its past."""
        clock = min((each.clock for each in self if each.identity.worker_id != identity.worker_id), default=0)
        self.add(Worker(identity, index_codecs, clock))

    def leave(self, identity: Identity) -> None:
        """Remove a worker, for whom nobody waits any more."""
        if self.find(identity) is not None:
            del self._by_name[identity.worker_id]
            self._end_wait()

    def push(self, identity: Identity) -> None:
        """Advance a worker's clock by a push."""
        worker = self.find(identity)
        if worker is None:
            return
        if worker.wait:  # it goes on after a wait in vain: nobody waits for what it has not done meanwhile
            worker.wait = 0
            others = (each.clock for each in self if each is not worker and not each.wait)
            worker.clock = max(worker.clock, min(others, default=0))
        worker.clock += 1

    def begin_wait(self, identity: Identity, number: int) -> None:
        """Note that a worker is through. Once all are, the wait is over, and all clocks are the same."""
        worker = self.find(identity)
        if worker is not None:
            worker.wait = number
            self._end_wait()

    def waited_for(self, identity: Identity, number: int) -> list[str]:
        """Return by name whom a wait goes on for; none if it is over, or its worker has no lease any more."""
        worker = self.find(identity)
        if worker is None or number <= worker.last_wait:
            return []
        return sorted(each.identity.worker_id for each in self if not each.wait)

    def _end_wait(self) -> None:
        if not all(each.wait for each in self):
            return
        clock = max((each.clock for each in self), default=0)
        for each in self:
            each.last_wait, each.wait, each.clock = max(each.wait, each.last_wait), 0, clock

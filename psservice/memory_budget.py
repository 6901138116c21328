"""The account of a shard's memory that grows with its calls: one limit for what is received, sent, and kept for both.

A call is charged for a message on arrival, and, before the decoding, for what the content will occupy at its largest.
A sparse reply is charged before it is made, at its largest; once it is made it counts for what it occupies, and once
for all calls that send it. It still counts while no call sends it, as long as it is kept for the next one that asks for
the same, and is dropped if an answer has no room beside it. A dense reply and a download are not charged: they read the
model while they are sent, and what pushes overwrite meanwhile is kept and counts (:mod:`psservice.model.copies`).

The values of an upload are written into the memory that the model will have: the metrics have them, the limit does not.

The images of workers' replicas, which top-k replies need, may have half of the limit, and with them the sums that WAGMA
keeps for late workers three quarters. Without room for an image a reply is exact; without room for a sum a round waits.
Of what images and sums leave, calls that receive may have two thirds, and answers, with what is kept for them, a third.
So clients that read slowly keep no push out. A worker's calls may have a half of that. While what is kept for answers
exceeds their share, no answer begins; it may grow by one model meanwhile, because pushes keep a value for the newest
copies only.

Beyond a limit a call is refused, and its bytes are released; nothing here waits. The oldest call that receives and the
oldest that answers are exempt, and so is the oldest of a worker.
"""

import math
import random
import threading
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar

from pscore.wire.errors import ErrorCode, Rejected

_LEAST_LIMIT_BYTES, _LIMIT_ELEMENT_BYTES = 7 << 30, 144  # of all, as --memory-bytes has it

_OF = " of --memory-bytes"
_RETRY_SECONDS = 0.5


def default_limit(elements: int) -> int:
    """Return the limit if ``--memory-bytes`` names none: 36 times the bytes of the shard in fp32.

    That is images of 17 workers, and beside them one push of every element and small ones, and sparse replies.
    """
    return max(_LEAST_LIMIT_BYTES, _LIMIT_ELEMENT_BYTES * elements)


class Occupies(Protocol):
    """What counts as long as it is kept, once, by whomever."""

    @property
    def nbytes(self) -> int:
        """Bytes that it occupies."""


Image = TypeVar("Image")


class Kept(NamedTuple):
    """Bytes of what a model keeps for answers.

    Attributes:
        copies: values that were overwritten while answers, or a snapshot, read the model; of a model that a restore
            has replaced, all that are still read.
        replies: those that are there for the next call that asks for the same, by ``id``; calls may send them too.
    """

    copies: int = 0
    replies: Mapping[int, int] = MappingProxyType({})


class MemoryBudget:
    """The calls in flight and what they occupy, at most ``most`` bytes. Thread-safe.

    Args:
        most: the limit.
        kept: returns what is kept for answers.
        sums: returns the bytes of the sums that WAGMA keeps for late workers.
        forget: drops the replies that are kept; calls that send one go on.

    Attributes:
        received: charged to calls that receive.
        answered: charged to calls that answer, beside what they share.
        images: bytes of the images of replicas, with the replies that are kept beside them.
        shared: what calls send, by the number of calls that do.
    """

    def __init__(
        self,
        most: int,
        kept: Callable[[], Kept] = Kept,
        sums: Callable[[], int] = lambda: 0,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self.most, self.kept, self.sums, self.forget = most, kept, sums, forget
        self.lock = threading.RLock()  # garbage collection may free an image under the lock
        self.received = self.answered = self.images = 0
        self.shared: dict[Occupies, int] = {}
        self.receiving: dict[Reservation, None] = {}
        self.answering: dict[Reservation, None] = {}
        self.by_worker: dict[str, dict[Reservation, None]] = {}

    @property
    def in_flight(self) -> int:
        """Bytes that calls occupy, with the copies that are kept for them."""
        return self.received + self.answers(self.kept()._replace(replies={}))

    @property
    def total(self) -> int:
        """All bytes of the account."""
        return self._total(self.kept())

    def answers(self, kept: Kept) -> int:
        """Return the bytes of calls that answer, and of what is kept for them."""
        with self.lock:
            replies = {**kept.replies, **{id(each): each.nbytes for each in [*self.shared]}}
            return self.answered + kept.copies + sum(replies.values())

    def room(self) -> int:
        """Return the bytes that calls may occupy beside what is kept for workers; a quarter is always theirs."""
        return max(self.most - self.images - self.sums(), self.most // 4)

    def has_room(self, nbytes: int) -> bool:
        """Tell whether so many bytes more of sums may be kept."""
        return self._has_room(nbytes, self.kept(), self.most - self.most // 4)

    def make_image(self, nbytes: int, make: Callable[[], Image]) -> Image | None:
        """Make an image, which counts until its last reference is gone; ``None`` if there is no room."""
        if not self._count_image(nbytes):
            return None
        try:
            image = make()
        except BaseException:
            self._free_image(nbytes)
            raise
        weakref.finalize(image, self._free_image, nbytes)
        return image

    def extend_image(self, image: object, nbytes: int) -> bool:
        """Count more bytes for an image, if there is room; tell whether there is."""
        if not self._count_image(nbytes):
            return False
        weakref.finalize(image, self._free_image, nbytes)
        return True

    def _count_image(self, nbytes: int) -> bool:
        kept = self.kept()
        with self.lock:
            fits = self._has_room(nbytes, kept, self.most // 2)
            self.images += nbytes * fits
        return fits

    def _free_image(self, nbytes: int) -> None:
        with self.lock:
            self.images -= nbytes

    def _total(self, kept: Kept) -> int:
        with self.lock:
            return self.received + self.answers(kept) + self.images + self.sums()

    def _has_room(self, nbytes: int, kept: Kept, most: int) -> bool:
        """Tell whether all fits, and images and sums into ``most``."""
        return self._total(kept) + nbytes <= self.most and self.images + self.sums() + nbytes <= most

    def exceeds(self, nbytes: int, kept: Kept) -> bool:
        """Tell whether answers would have more than their share with so many bytes more."""
        return self.answers(kept) + nbytes > self.room() // 3

    def receive(self, largest: float = math.inf) -> "Reservation":
        """Return the reservation of a new call that receives up to ``largest`` bytes, a context."""
        return Reservation(self, largest, answers=False)

    def answer(self) -> "Reservation":
        """Return the reservation of a new call that answers, a context."""
        return Reservation(self, math.inf, answers=True)


class Reservation:
    """What one call occupies, until the end of the context."""

    def __init__(self, budget: MemoryBudget, largest: float, *, answers: bool) -> None:
        self._budget, self._largest, self._answers = budget, largest, answers
        self._calls = budget.answering if answers else budget.receiving
        self._worker: str | None = None
        self._of_worker: dict[Reservation, None] = {}  # this call and its worker's others, the oldest first
        self.bytes = 0
        self.shared: Occupies | None = None

    def __enter__(self) -> "Reservation":
        with self._budget.lock:
            self._calls[self] = None
        return self

    def __exit__(self, *_: object) -> None:
        budget = self._budget
        with budget.lock:
            self._charge(-self.bytes)
            if self.shared is not None:
                budget.shared[self.shared] -= 1
                if not budget.shared[self.shared]:
                    del budget.shared[self.shared]
            del self._calls[self]
            if self._worker is not None:
                del self._of_worker[self]
                if not self._of_worker:
                    del budget.by_worker[self._worker]

    @property
    def occupied(self) -> int:
        """Bytes of this call, with all of what it shares."""
        return self.bytes + (0 if self.shared is None else self.shared.nbytes)

    def clear(self) -> None:
        """Release what was charged so far."""
        with self._budget.lock:
            self._charge(-self.bytes)

    def share(self, made: Occupies) -> None:
        """Release what was charged so far, and count what has been made until the call's end, once for all calls."""
        budget = self._budget
        with budget.lock:
            self._charge(-self.bytes)
            self.shared = made
            budget.shared[made] = budget.shared.get(made, 0) + 1

    def belongs_to(self, worker_id: str) -> None:
        """Note whose call this is; raises :class:`Rejected` (``BUSY``)."""
        with self._budget.lock:
            if self._worker is None:
                self._worker = worker_id
                self._of_worker = self._budget.by_worker.setdefault(worker_id, {})
                self._of_worker[self] = None
        self.add(0)

    def add(self, nbytes: int) -> None:
        """Charge more bytes; raises ``BAD_REQUEST`` beyond any valid stream, ``BUSY`` beyond the other limits."""
        budget, kept = self._budget, Kept()
        if self._answers:
            kept = budget.kept()
            if kept.replies and budget.exceeds(nbytes, kept):
                budget.forget()
                kept = budget.kept()
        room = budget.room()
        with budget.lock:
            mine = self.bytes + nbytes
            if mine > self._largest:
                raise Rejected(
                    ErrorCode.BAD_REQUEST,
                    f"this stream would occupy {mine} bytes here, and no valid one of this shard needs more than "
                    f"{self._largest}; send larger chunks",
                )
            if len(self._of_worker) > 1 and next(iter(self._of_worker)) is not self:
                held = sum([call.occupied for call in self._of_worker])
                if held + nbytes > room // 2:
                    raise _busy(f"calls of worker {self._worker!r} hold {held} bytes, {room // 2} are theirs{_OF}")
            if next(iter(self._calls)) is not self:
                if self._answers and budget.exceeds(nbytes, kept):
                    raise _busy(f"answers hold {budget.answers(kept)} bytes, {room // 3} are theirs{_OF}")
                if not self._answers and budget.received + nbytes > (most := room - room // 3):
                    raise _busy(f"pushes and uploads hold {budget.received} bytes, {most} are theirs{_OF}")
            self._charge(nbytes)

    def _charge(self, nbytes: int) -> None:
        self.bytes += nbytes
        if self._answers:
            self._budget.answered += nbytes
        else:
            self._budget.received += nbytes


def _busy(why: str) -> Rejected:
    return Rejected(ErrorCode.BUSY, why, retry_seconds=_RETRY_SECONDS * random.uniform(0.5, 1.5))

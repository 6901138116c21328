"""The account of a shard's memory that grows with its calls: one limit for what is received and what is sent.

A call is charged for a message on arrival, and, before the decoding, for what the content will occupy at its largest.
A sparse reply is charged before it is made, at its largest; once it is made it counts for what it occupies, and once
for all calls that send it. A dense reply and a download are not charged: they read the model while they are sent, and
what pushes overwrite meanwhile is kept and counts (:mod:`psservice.model.copies`).

What is received may have two thirds of the limit, and answers, with what is kept for them, a third. So clients that
read slowly keep no push out. A worker's calls may have a half. While what is kept exceeds the answers' share, no
answer begins; it may grow by one model meanwhile, because pushes keep a value for the newest copies only.

Beyond a limit a call is refused, and its bytes are released; nothing here waits. The oldest call that receives and the
oldest that answers are exempt, and so is the oldest of a worker.
"""

import math
import random
import threading
from collections.abc import Callable
from typing import Protocol

from google.protobuf.message import Message

from pscore.model.layout import ModelLayout
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

_MESSAGE_BYTES = 3072  # of objects around a chunk: message, tensors, segment; 1.3 to 2.0 KB were measured
_GROUP_BYTES = 512  # of objects around a group of a plan
_SPARSE_ENTRY_BYTES = 12  # int64 offset, fp32 value
_DENSE_ENTRY_BYTES = 4

_ROOM_BYTES = 32 << 20  # for what does not grow with the model
_ELEMENT_BYTES = 48  # of a push of every element, as raw offsets and fp32 values: 40 are charged
_TENSOR_BYTES = 16 << 10  # each may be a group, and a chunk or a few, of its own

_LEAST_LIMIT_BYTES, _LIMIT_ELEMENT_BYTES = 3 << 30, 96  # of all calls, as --memory-bytes has it

_RETRY_SECONDS = 0.5


def default_limit(elements: int) -> int:
    """Return the limit if ``--memory-bytes`` names none: 24 times the bytes of the shard in fp32.

    That is one push of every element and small ones beside it, and sparse replies of a third.
    """
    return max(_LEAST_LIMIT_BYTES, _LIMIT_ELEMENT_BYTES * elements)


def largest_stream(layout: ModelLayout | None, elements: int) -> int:
    """Return more bytes than any valid push or upload of a shard occupies, however it is cut into groups."""
    if layout is None:
        return _ROOM_BYTES
    buffers = 4 * sum(spec.nbytes for spec in layout.buffers)
    return _ROOM_BYTES + _ELEMENT_BYTES * elements + _TENSOR_BYTES * len(layout.parameters) + buffers


class SharedBytes(Protocol):
    """What several calls may send."""

    @property
    def nbytes(self) -> int:
        """Bytes that it occupies."""


class MemoryBudget:
    """The calls in flight and what they occupy, at most ``most`` bytes. Thread-safe.

    Args:
        most: the limit.
        kept: returns the bytes that are kept for answers that read the model while they are sent.

    Attributes:
        received: charged to calls that receive.
        answered: charged to calls that answer, beside what they share.
        shared: what calls send, by the number of calls that do.
    """

    def __init__(self, most: int, kept: Callable[[], int] = lambda: 0) -> None:
        self.most, self.kept = most, kept
        self.lock = threading.Lock()
        self.received = self.answered = 0
        self.shared: dict[SharedBytes, int] = {}
        self.receiving: dict[Reservation, None] = {}
        self.answering: dict[Reservation, None] = {}
        self.by_worker: dict[str, dict[Reservation, None]] = {}

    @property
    def total(self) -> int:
        """Bytes that all calls occupy."""
        kept = self.kept()
        with self.lock:
            return self.received + self.answers() + kept

    def answers(self) -> int:
        """Bytes that calls which answer occupy, without what is kept for them; ``lock`` is held."""
        return self.answered + sum([each.nbytes for each in self.shared])

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
        self.shared: SharedBytes | None = None

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

    def share(self, made: SharedBytes) -> None:
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
        budget = self._budget
        kept = budget.kept()
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
                if held + nbytes > budget.most // 2:
                    raise _busy(f"calls of worker {self._worker!r} hold {held} bytes, half of --memory-bytes is theirs")
            if next(iter(self._calls)) is not self:
                answers, share = budget.answers() + kept, budget.most // 3
                if self._answers and answers + nbytes > share:
                    raise _busy(f"answers hold {answers} bytes, a third of --memory-bytes is theirs")
                if not self._answers and budget.received + nbytes > budget.most - share:
                    raise _busy(
                        f"pushes and uploads hold {budget.received} bytes, two thirds of --memory-bytes are theirs"
                    )
            self._charge(nbytes)

    def _charge(self, nbytes: int) -> None:
        self.bytes += nbytes
        if self._answers:
            self._budget.answered += nbytes
        else:
            self._budget.received += nbytes


def received_bytes(nbytes: int) -> int:
    """Return what a message occupies beside what is decoded of it: as it came, and as the journal writes it."""
    return _MESSAGE_BYTES + 2 * nbytes


def decoded_bytes(request: Message) -> int:
    """Return what is decoded of a message at its largest, and merged; only streams decode much.

    An upload's values go straight to their place, or through one fp32 copy.
    """
    nbytes = 0
    if isinstance(request, pb.PushSparseRequest):
        nbytes = _GROUP_BYTES * len(request.header.plan) + _MESSAGE_BYTES * max(0, len(request.chunks) - 1)
        for chunk in request.chunks:
            nbytes += _chunk_bytes(chunk, _SPARSE_ENTRY_BYTES)
    if isinstance(request, pb.UploadModelRequest | pb.ExchangeBuffersRequest):
        nbytes += 2 * len(request.buffers.data)
    if isinstance(request, pb.UploadModelRequest):
        nbytes += _chunk_bytes(request.chunk)
    return nbytes


def _chunk_bytes(chunk: pb.Chunk, merged_bytes: int = 0) -> int:
    entry_bytes = _DENSE_ENTRY_BYTES if chunk.index_codec == pb.INDEX_CODEC_DENSE else _SPARSE_ENTRY_BYTES
    return min(chunk.count, chunk.length) * (entry_bytes + merged_bytes)  # a false count is refused when decoded


def _busy(why: str) -> Rejected:
    return Rejected(ErrorCode.BUSY, why, retry_seconds=_RETRY_SECONDS * random.uniform(0.5, 1.5))

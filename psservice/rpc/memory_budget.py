"""Bytes in flight: what calls occupy while they run, limited by stream, by worker and in total.

A call is charged for a message on arrival, and, before the decoding, for what the content will occupy at its largest.
A pull is charged before its reply is made, at its largest; once the reply is made it counts for what it occupies, and
once for all calls that send it. Beyond a limit a call is refused, and its bytes are released; nothing here waits. The
oldest call in flight is exempt from the total, and the oldest of a worker from the worker's limit. So the oldest call
is never refused, and memory stays below the total and one stream.
"""

import math
import random
import threading
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

_LEAST_LIMIT_BYTES, _LIMIT_ELEMENT_BYTES = 1 << 30, 32  # of all calls of a kind, as --inflight-bytes has it

_RETRY_SECONDS = 0.5


def default_limit(elements: int) -> int:
    """Return the bytes of all calls of a kind if ``--inflight-bytes`` names none: eight times the shard's in fp32.

    That is one push of every element and small ones beside it, or eight replies of every element.
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

    Attributes:
        bytes: charged to calls, beside what they share.
        shared: what calls send, by the number of calls that do.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.lock = threading.Lock()
        self.bytes = 0
        self.shared: dict[SharedBytes, int] = {}
        self.calls: dict[Reservation, None] = {}
        self.by_worker: dict[str, dict[Reservation, None]] = {}

    @property
    def total(self) -> int:
        """Bytes that all calls occupy."""
        with self.lock:
            return self.total_now()

    def total_now(self) -> int:
        """Bytes that all calls occupy; ``lock`` is held."""
        return self.bytes + sum(each.nbytes for each in self.shared)

    def open(self, largest: float = math.inf, most_of_worker: float = math.inf) -> "Reservation":
        """Return the reservation of a new call, a context; ``most_of_worker`` is for all calls of its worker."""
        return Reservation(self, largest, most_of_worker)


class Reservation:
    """What one call occupies, until the end of the context."""

    def __init__(self, budget: MemoryBudget, largest: float, most_of_worker: float) -> None:
        self._budget, self._largest, self._most_of_worker = budget, largest, most_of_worker
        self._worker: str | None = None
        self._of_worker: dict[Reservation, None] = {}  # this call and its worker's others, the oldest first
        self.bytes = 0
        self.shared: SharedBytes | None = None

    def __enter__(self) -> "Reservation":
        with self._budget.lock:
            self._budget.calls[self] = None
        return self

    def __exit__(self, *_: object) -> None:
        budget = self._budget
        with budget.lock:
            budget.bytes -= self.bytes
            self.bytes = 0
            if self.shared is not None:
                budget.shared[self.shared] -= 1
                if not budget.shared[self.shared]:
                    del budget.shared[self.shared]
            del budget.calls[self]
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
            self._budget.bytes -= self.bytes
            self.bytes = 0

    def share(self, made: SharedBytes) -> None:
        """Release what was charged so far, and count what has been made until the call's end, once for all calls."""
        budget = self._budget
        with budget.lock:
            budget.bytes -= self.bytes
            self.bytes, self.shared = 0, made
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
        with budget.lock:
            mine, total = self.bytes + nbytes, budget.total_now() + nbytes
            if mine > self._largest:
                raise Rejected(
                    ErrorCode.BAD_REQUEST,
                    f"this stream would occupy {mine} bytes here, at most {self._largest} are given to one; send "
                    "larger chunks, or raise --stream-bytes",
                )
            if len(self._of_worker) > 1 and next(iter(self._of_worker)) is not self:
                held = sum([call.occupied for call in self._of_worker])
                if held + nbytes > self._most_of_worker:
                    raise _busy(f"calls of worker {self._worker!r} hold {held} bytes (--worker-bytes)")
            if total > budget.most and next(iter(budget.calls)) is not self:
                raise _busy(f"calls in flight hold {budget.total_now()} bytes (--inflight-bytes)")
            self.bytes = mine
            budget.bytes += nbytes


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

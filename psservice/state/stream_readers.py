"""Readers of client streams: they check each message as it arrives, and apply nothing.

A reader is a generator. The RPC layer sends each message into it on arrival, and ``None`` at the stream's end; its
return value is the result. The reader of a push ends at the commit, others at the stream's end. So no thread waits for
a client, and a replay of the journal reads by the same code.
"""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from google.protobuf.message import Message

from pscore.model.dense_place import DensePlace
from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.frames import Checksum, ChunkReader
from pscore.wire.v1 import parameter_server_pb2 as pb

Request = TypeVar("Request", bound=Message)
Result = TypeVar("Result")

Reading = Generator[None, Request | None, Result]
"""A reader that has not begun; ``next`` brings it to its first message."""


def read_all(reading: "Reading[Request, Result]", requests: Iterable[Request]) -> Result:
    """Read a stream whose messages are all there; raises :class:`Rejected` as the reader does."""
    next(reading)
    left = iter(requests)
    try:
        for request in left:
            reading.send(request)
        reading.send(None)
    except StopIteration as end:
        require_end(next(left, None))
        result: Result = end.value
        return result
    raise AssertionError("a reader must end where its stream ends")


def header_of(first: Any, what: str) -> Any:
    """Return the header of a stream's first message; raises :class:`Rejected` (``BAD_REQUEST``) if it has none."""
    if first is None or not first.HasField("header"):
        raise Rejected(ErrorCode.BAD_REQUEST, f"{what} begins with its header")
    return first.header


def require_end(request: Message | None) -> None:
    """Check that no message follows; raises :class:`Rejected` (``BAD_REQUEST``)."""
    if request is not None:
        raise Rejected(ErrorCode.BAD_REQUEST, "a message follows the commit")


def read_push(
    accept: Callable[[pb.PushHeader], tuple[Span, torch.dtype]],
    clock: Callable[[], int] = time.perf_counter_ns,
    values: Callable[[], Sequence[memoryview]] = tuple,
) -> Reading[pb.PushSparseRequest, tuple[pb.PushHeader, SparseSlice | None, list[int]]]:
    """Read a whole push: its groups in any order, each ascending inside its own span.

    ``accept`` checks the header and returns the shard's span, and the dtype of its values. ``clock`` tells when the
    message that is being read has arrived, ``values`` its value bytes that are not in the message itself. Returns the
    header, the entries over the shard's span (``None``: there are none), and when each group was whole, nanoseconds
    after the header. Raises :class:`Rejected` if the stream breaks the form, or is cut (``BAD_COMMIT``).
    """
    request = yield
    header: pb.PushHeader = header_of(request, "a push")
    span, dtype = accept(header)
    plan = plan_of(header, span)
    checksum, started = Checksum(), clock()
    readers = [ChunkReader(group, checksum, origin=span.start, dtype=dtype) for group in plan]
    # Of pages that the system allocates when they are written.
    dense = DensePlace(span, lambda: torch.empty(span.length, dtype=dtype, device="cpu"))
    arrivals = [0] * len(plan)
    while request is not None:
        found = values()
        for number, chunk in enumerate(request.chunks):
            if chunk.group >= len(plan):
                raise Rejected(ErrorCode.BAD_CHUNK, f"group {chunk.group} of a plan of {len(plan)}")
            reader = readers[chunk.group]
            reader.segments[-1] = dense.moved(reader.read(chunk, *found[number : number + 1]))
            arrivals[chunk.group] = clock() - started
        if request.HasField("commit"):
            checksum.verify(request.commit)
            readers.sort(key=lambda reader: reader.within.start)
            return header, dense.joined([segment for reader in readers for segment in reader.segments]), arrivals
        request = yield
        if request is not None and (request.HasField("header") or not (request.chunks or request.HasField("commit"))):
            raise Rejected(ErrorCode.BAD_REQUEST, "a push goes on with chunks or its commit")
    raise Rejected(ErrorCode.BAD_COMMIT, "the stream ended without a commit")


def plan_of(header: pb.PushHeader, span: Span) -> list[Span]:
    """Return a push's groups; raises :class:`Rejected` (``BAD_REQUEST``) if they leave the span or overlap."""
    plan = [Span(group.start, group.start + group.length) for group in header.plan]
    for group in plan:
        if not (span.start <= group.start and group.end <= span.end):
            raise Rejected(
                ErrorCode.BAD_REQUEST,
                f"group [{group.start}, {group.end}) lies outside the shard's [{span.start}, {span.end})",
            )
    for left, right in pairwise(sorted(plan, key=lambda group: group.start)):
        if left.end > right.start:
            raise Rejected(ErrorCode.BAD_REQUEST, f"groups overlap at {right.start}")
    return plan

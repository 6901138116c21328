"""Readers of client streams: they check each message as it arrives, and apply nothing.

A reader is a generator. The RPC layer sends each message into it on arrival, and ``None`` at the stream's end; its
return value is the result. So no thread waits for a client, and a replay of the journal reads by the same code.
"""

import time
from collections.abc import Callable, Generator, Iterable
from itertools import pairwise
from typing import Any, TypeVar

from google.protobuf.message import Message

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
    try:
        for request in requests:
            reading.send(request)
        reading.send(None)
    except StopIteration as end:
        result: Result = end.value
        return result
    raise AssertionError("a reader must end where its stream ends")


def header_of(first: Any, what: str) -> Any:
    """Return the header of a stream's first message; raises :class:`Rejected` (``BAD_REQUEST``) where it has none."""
    if first is None or first.WhichOneof("message") != "header":
        raise Rejected(ErrorCode.BAD_REQUEST, f"{what} begins with its header")
    return first.header


def require_end(request: Message | None) -> None:
    """Check that no message follows; raises :class:`Rejected` (``BAD_REQUEST``)."""
    if request is not None:
        raise Rejected(ErrorCode.BAD_REQUEST, "a message follows the commit")


class PushReader:
    """Reads the chunks of a push: groups in any order, each group ascending inside its own span.

    Args:
        plan: the header's groups.
        span: what the shard owns.
        clock: when the chunk that is being read has arrived, nanoseconds.

    Raises:
        Rejected: ``BAD_REQUEST`` where groups leave the shard or overlap.

    Attributes:
        arrivals: when each group was whole, nanoseconds after the header.
    """

    @classmethod
    def of(cls, header: pb.PushHeader, span: Span, clock: Callable[[], int] = time.perf_counter_ns) -> "PushReader":
        """Return a reader for what follows a header."""
        return cls([Span(group.start, group.start + group.length) for group in header.plan], span, clock)

    def __init__(self, plan: list[Span], span: Span, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        for group in plan:
            if not (span.start <= group.start and group.end <= span.end):
                raise Rejected(
                    ErrorCode.BAD_REQUEST,
                    f"group [{group.start}, {group.end}) lies outside the shard's [{span.start}, {span.end})",
                )
        for left, right in pairwise(sorted(plan, key=lambda group: group.start)):
            if left.end > right.start:
                raise Rejected(ErrorCode.BAD_REQUEST, f"groups overlap at {right.start}")
        self._checksum = Checksum()
        self._readers = [ChunkReader(group, self._checksum) for group in plan]
        self._clock, self._started = clock, clock()
        self.arrivals = [0] * len(plan)

    def read(self, chunk: pb.Chunk) -> None:
        """Decode one chunk; raises :class:`Rejected`."""
        if chunk.group >= len(self._readers):
            raise Rejected(ErrorCode.BAD_CHUNK, f"group {chunk.group} of a plan of {len(self._readers)}")
        self._readers[chunk.group].read(chunk)
        self.arrivals[chunk.group] = self._clock() - self._started

    def finish(self, commit: pb.Commit) -> list[SparseSlice]:
        """Check the commit and return every segment."""
        self._checksum.verify(commit)
        return [segment for reader in self._readers for segment in reader.segments]


def read_push(
    open_push: Callable[[pb.PushHeader], PushReader],
) -> Reading[pb.PushSparseRequest, tuple[pb.PushHeader, PushReader, list[SparseSlice]]]:
    """Read a whole push; ``open_push`` checks the header and returns a reader for what follows.

    Raises:
        Rejected: the stream breaks the form, or is cut (``BAD_COMMIT``).
    """
    header = header_of((yield), "a push")
    reader = open_push(header)
    while (request := (yield)) is not None:
        kind = request.WhichOneof("message")
        if kind == "chunk":
            reader.read(request.chunk)
        elif kind == "commit":
            segments = reader.finish(request.commit)
            require_end((yield))
            return header, reader, segments
        else:
            raise Rejected(ErrorCode.BAD_REQUEST, f"unexpected {kind or 'empty message'} inside a push")
    raise Rejected(ErrorCode.BAD_COMMIT, "the stream ended without a commit")

"""Reading client streams: header, chunks, commit; everything checked as it comes, nothing applied."""

import time
from collections.abc import Callable, Iterator
from itertools import pairwise

from pscore.frames import BytesReader, Checksum, ChunkReader, wire_bytes
from pscore.layout import Span
from pscore.reasons import Reason, Refusal
from pscore.segment import Segment
from pscore.tracing import traced
from pscore.v1 import parameter_server_pb2 as pb


class PushReader:
    """Reads the chunks of a push: groups in any order, each group ascending inside its own span.

    Args:
        plan: the header's groups.
        span: what the shard owns.
        keep: whether :attr:`messages` are kept, for the journal.

    Raises:
        Refusal: ``BAD_REQUEST`` where groups leave the shard or overlap.

    Attributes:
        arrivals: when each group was whole, nanoseconds after the header.
        bytes: of the stream so far.
        messages: the stream as it came, where it is kept.
    """

    @classmethod
    def of(cls, header: pb.PushHeader, span: Span, *, keep: bool = False) -> "PushReader":
        """Return a reader for what follows a header."""
        return cls([Span(group.start, group.start + group.length) for group in header.plan], span, keep=keep)

    def __init__(self, plan: list[Span], span: Span, *, keep: bool = False) -> None:
        """Check the plan."""
        for group in plan:
            if not (span.start <= group.start and group.end <= span.end):
                raise Refusal(
                    Reason.BAD_REQUEST,
                    f"group [{group.start}, {group.end}) lies outside the shard's [{span.start}, {span.end})",
                )
        ascending = sorted(plan, key=lambda group: group.start)
        for left, right in pairwise(ascending):
            if left.end > right.start:
                raise Refusal(Reason.BAD_REQUEST, f"groups overlap at {right.start}")
        self._checksum = Checksum()
        self._readers = [ChunkReader(group, self._checksum) for group in plan]
        self._started = time.perf_counter_ns()
        self.arrivals = [0] * len(plan)
        self.bytes = 0
        self.messages: list[pb.PushSparseRequest] = []
        self._keep = keep

    def read(self, chunk: pb.Chunk) -> None:
        """Take one chunk in; raises :class:`Refusal`."""
        if chunk.group >= len(self._readers):
            raise Refusal(Reason.BAD_CHUNK, f"group {chunk.group} of a plan of {len(self._readers)}")
        self._readers[chunk.group].read(chunk)
        self.arrivals[chunk.group] = time.perf_counter_ns() - self._started

    def took(self, request: pb.PushSparseRequest) -> None:
        """Count a message of the stream, and keep it where they are kept."""
        self.bytes += wire_bytes(request)
        if self._keep:
            self.messages.append(request)

    def finish(self, commit: pb.Commit) -> list[Segment]:
        """Check the commit and return every segment."""
        self._checksum.verify(commit)
        return [segment for reader in self._readers for segment in reader.segments]


@traced("receive")
def read_push(
    requests: Iterator[pb.PushSparseRequest], open_push: Callable[[pb.PushHeader], PushReader]
) -> tuple[pb.PushHeader, PushReader, list[Segment]]:
    """Read a whole push.

    Args:
        requests: the stream.
        open_push: checks the header and returns a reader for what follows.

    Raises:
        Refusal: the stream breaks the form, or is cut (``BAD_COMMIT``).
    """
    first = next(requests, None)
    if first is None or first.WhichOneof("message") != "header":
        raise Refusal(Reason.BAD_REQUEST, "a push begins with its header")
    reader = open_push(first.header)
    reader.took(first)
    for request in requests:
        reader.took(request)
        kind = request.WhichOneof("message")
        if kind == "chunk":
            reader.read(request.chunk)
        elif kind == "commit":
            segments = reader.finish(request.commit)
            require_end(requests)
            return first.header, reader, segments
        else:
            raise Refusal(Reason.BAD_REQUEST, f"unexpected {kind or 'empty message'} inside a push")
    raise Refusal(Reason.BAD_COMMIT, "the stream ended without a commit")


def read_upload(
    requests: Iterator[pb.UploadModelRequest],
    open_upload: Callable[[pb.UploadHeader], tuple[Span, int]],
) -> tuple[pb.UploadHeader, list[Segment], bytes]:
    """Read a whole upload; ``open_upload`` checks the header and returns the shard's span and its bytes of buffers.

    Raises:
        Refusal: the stream breaks the form, is cut, or does not cover the span.
    """
    first = next(requests, None)
    if first is None or first.WhichOneof("message") != "header":
        raise Refusal(Reason.BAD_REQUEST, "an upload begins with its header")
    span, buffer_bytes = open_upload(first.header)
    chunks, buffers = ChunkReader(span), BytesReader(first.header.buffer_bytes, buffer_bytes)
    for request in requests:
        kind = request.WhichOneof("message")
        if kind == "chunk":
            chunks.read(request.chunk)
        elif kind == "buffers":
            buffers.read(request.buffers)
        elif kind == "commit":
            chunks.checksum.verify(request.commit)
            chunks.require_complete()
            require_end(requests)
            return first.header, chunks.segments, buffers.finish()
        else:
            raise Refusal(Reason.BAD_REQUEST, f"unexpected {kind or 'empty message'} inside an upload")
    raise Refusal(Reason.BAD_COMMIT, "the stream ended without a commit")


def require_end(requests: Iterator[object]) -> None:
    """Check that nothing follows; raises :class:`Refusal` (``BAD_REQUEST``)."""
    if next(requests, None) is not None:
        raise Refusal(Reason.BAD_REQUEST, "a message follows the commit")

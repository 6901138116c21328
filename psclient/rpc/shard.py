"""One shard as a worker sees it: what the worker knows of the replica there, and pushes and pulls.

Nothing here decides what a failure means for training; each call returns an outcome and :mod:`psclient.rpc.cluster`
acts on it.
"""

import math
import queue
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from psclient.buckets.trace import PushTiming
from psclient.errors import ServerFaultError, Transient
from psclient.rpc.channel import Connection, RetryPolicy
from psclient.rpc.progress_line import ProgressLine
from psclient.rpc.stall import StreamCall
from psclient.settings import AUTO, ClientSettings
from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.telemetry import tracing
from pscore.telemetry.span import NO_SPAN, TraceSpan
from pscore.wire import frames
from pscore.wire.codecs.names import INDEX_CODECS, VALUE_CODECS
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

REJOIN_REASONS = frozenset(
    {
        ErrorCode.LEASE_EXPIRED,
        ErrorCode.STALE_GENERATION,
        ErrorCode.RUN_MISMATCH,
        ErrorCode.NOT_INITIALISED,
        ErrorCode.VERSION_IN_FUTURE,
    }
)
"""Refusals after which a worker joins again; all but the first mean that the server's training is another one."""

_SMALLEST_BYTES = 64 << 10  # below it, a time depends more on delay than on bandwidth
_REMEMBERED = 16


class Bandwidth:
    """The fastest of the last large transfers: a lower bound, because other things may have slowed each of them."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def bytes_per_second(self) -> float | None:
        """The estimate; ``None`` before the first large transfer."""
        return max(self._recent, default=None)

    def update(self, nbytes: int, seconds: float) -> None:
        """Count a transfer: from its first byte to its last, without the time for decoding."""
        if nbytes >= _SMALLEST_BYTES and seconds > 0:
            self._recent.append(nbytes / seconds)


@dataclass(slots=True)
class PushPart:
    """One shard's part of a push, kept until it is acknowledged or refused.

    ``messages`` are the same bytes at each attempt; ``segments`` the payload as it arrives, for giving it back.
    """

    generation: int
    messages: list[pb.PushSparseRequest] = field(default_factory=list)
    segments: list[SparseSlice] = field(default_factory=list)
    checksum: frames.Checksum = field(default_factory=frames.Checksum)
    bytes: int = 0
    trace: TraceSpan = NO_SPAN


@dataclass(slots=True)
class PulledReply:
    """A whole, checked reply; ``bytes`` are those of messages, ``arrived`` is of :func:`time.perf_counter`."""

    header: pb.PullHeader
    segments: list[SparseSlice]
    generation: int
    bytes: int
    decode_seconds: float
    arrived: float


class _PartialReply(NamedTuple):
    """The checked beginning of a reply of everything that was cut: the elements before ``end``, at ``version``.

    Where two segments have the same element, the later one counts.
    """

    generation: int
    version: int
    end: int
    segments: list[SparseSlice]
    bytes: int


class ShardClient:
    """The pushes and pulls of one shard, and the state of the replica with respect to it.

    Attributes:
        has_base: whether the replica is the model at ``version``, or with ``replica_is_image`` the image of it there.
        unacked: the part of the last push that is neither acknowledged nor refused.
        readable: the index codecs that the server reads.
        outgoing: the push or upload that is under way.
        sent_model: generation and version of an upload that is not answered.
        timing: when the groups of the last push left and arrived, for measuring the link.
    """

    def __init__(self, connection: Connection, index: int, settings: ClientSettings) -> None:
        self.connection = connection
        self.lease_connection = connection.twin()
        self.index = index
        self.span = Span(0, 0)
        self.generation = 0
        self.version = 0
        self.has_base = False
        self.acknowledged_reply = 0
        self.replica_is_image = False
        self.unacked: PushPart | None = None
        self.readable: frozenset[int] = frozenset()
        self.downlink = Bandwidth()
        self.timing = PushTiming(0)
        self.outgoing = StreamCall(settings.deadline_seconds)
        self.sent_model: tuple[int, int] | None = None
        self._settings = settings
        self._uplink = Bandwidth()
        self._queue: queue.SimpleQueue[pb.PushSparseRequest | None] | None = None
        self._streamed: StreamCall | None = None  # the first attempt of a push, which began before its commit
        self._received_bytes = 0  # of the outgoing streams, as the server has said last
        self._partial: _PartialReply | None = None

    @property
    def address(self) -> str:
        """``HOST:PORT``, or another name of the shard."""
        return self.connection.address

    def close(self) -> None:
        """Close both channels."""
        self.outgoing.end()
        self.connection.close()
        self.lease_connection.close()

    def note_receipt(self, received_bytes: int, *, installing: bool) -> None:
        """Note how many bytes of this worker's streams the server has, and whether the server installs a model."""
        if received_bytes != self._received_bytes or installing:
            self._received_bytes = received_bytes
            self.outgoing.note_receipt()

    def adopt(self, generation: int, *, version: int | None = None) -> None:
        """Note the shard's generation; with ``version``, that the replica is the model at that version there."""
        if generation != self.generation:
            self.generation = generation
            self.forget_base()
            if self.sent_model is not None and self.sent_model[0] == generation:
                version = self.sent_model[1]  # the server has the upload, and its answer is lost
            self.sent_model = None
        if version is not None:
            self.forget_base()
            self.version, self.has_base = version, True

    def forget_base(self) -> None:
        """Note that the replica is not the model at any version: the next pull asks for everything."""
        self.has_base = False
        self.acknowledged_reply, self.replica_is_image = 0, False

    # Push

    @property
    def push_form(self) -> frames.WireForm:
        """How a push to this shard is written now."""
        index = self._settings.index_codec
        return frames.WireForm(
            value=VALUE_CODECS[self._settings.value_type],
            index=None if index == AUTO else INDEX_CODECS[index],
            allowed=self.readable,
            link_bytes_per_second=self._uplink.bytes_per_second,
        )

    def open_push(self, header: pb.PushHeader, plan: list[Span], idle_seconds: float) -> None:
        """Begin to stream a push; ``header`` lacks what this shard knows: generation, version and plan."""
        header.generation = self.generation  # read once: a fetch on another thread may join again
        header.base_version = self.version
        header.plan.extend(pb.Group(start=group.start, length=group.length) for group in plan)
        self.timing = PushTiming(len(plan))
        self.unacked = PushPart(header.generation, trace=tracing.begin("push", shard=self.index))
        self._queue = queue.SimpleQueue()
        self._streamed = self._start_push(iter(self._queue.get, None), idle_seconds, self.unacked.trace)
        self.timing.opened = time.perf_counter()
        self._send(pb.PushSparseRequest(header=header))

    def _start_push(
        self, messages: Iterator[pb.PushSparseRequest], idle_seconds: float, trace: TraceSpan
    ) -> StreamCall:
        call = self.outgoing = StreamCall(idle_seconds)
        return call.start(self.connection.stub.PushSparse.future(call.outgoing(messages), metadata=trace.headers))

    def send_chunk(self, chunk: pb.Chunk) -> None:
        """Send one chunk of the open push."""
        assert self.unacked is not None
        self.unacked.checksum.add(chunk)
        self.timing.group_bytes[chunk.group] += self._send(pb.PushSparseRequest(chunk=chunk))
        self.timing.left[chunk.group] = time.perf_counter() - self.timing.opened

    def hold(self, segment: SparseSlice) -> None:
        """Keep a piece of the payload, for giving it back."""
        assert self.unacked is not None
        self.unacked.segments.append(segment)

    def send_commit(self) -> int:
        """End the stream; return the message bytes of the whole push."""
        assert self.unacked is not None
        self._send(pb.PushSparseRequest(commit=self.unacked.checksum.commit()))
        self._end_queue()
        return self.unacked.bytes

    def abandon_push(self) -> PushPart | None:
        """Break a push off before its commit: nothing of it can have been applied."""
        part, self.unacked = self.unacked, None
        if part is not None:
            part.trace.end("abandoned")
        self.outgoing.end()
        self._end_queue()
        self._streamed = None
        return part

    def await_ack(self, policy: RetryPolicy) -> pb.PushSparseResponse | Rejected:
        """Wait for the answer to the unacked part, which stays unacked where there is none in time."""
        part, streamed = self.unacked, self._streamed
        assert part is not None

        def start(seconds: float) -> StreamCall:
            call, self._streamed = self._streamed, None
            if call is None:
                call = self._start_push(iter(part.messages), seconds, part.trace)
            call.limit = policy.limit
            return call

        answer: tuple[bool, pb.PushSparseResponse] | Rejected
        answer = self.connection.call(policy, start, lambda call: (call is streamed, call.result()))
        if isinstance(answer, Rejected):
            if answer.reason is not ErrorCode.LEASE_EXPIRED:  # else it is repeated, after joining
                part.trace.end(answer.reason.name)
            return answer
        at_first, response = answer
        arrivals = [nanoseconds / 1e9 for nanoseconds in response.group_arrival_nanoseconds]  # after the header
        if at_first and not response.repeated_push:
            self.timing.arrived = arrivals
        before = 0.0  # a group cannot have taken longer than since the group before it was whole
        for nbytes, arrival in zip(self.timing.group_bytes, arrivals, strict=False):
            self._uplink.update(nbytes, arrival - before)
            before = max(before, arrival)
        self.unacked = None
        part.trace.note(version=response.version, staleness=response.staleness)
        part.trace.end()
        return response

    def _send(self, message: pb.PushSparseRequest) -> int:
        """Send a message of the open push; return its bytes."""
        assert self.unacked is not None
        assert self._queue is not None
        nbytes = frames.wire_bytes(message)
        self.unacked.messages.append(message)
        self.unacked.bytes += nbytes
        self._queue.put(message)
        return nbytes

    def _end_queue(self) -> None:
        if self._queue is not None:
            self._queue.put(None)
        self._queue = None

    # Pull

    def pull(self, identity: pb.WorkerIdentity, policy: RetryPolicy) -> PulledReply | Rejected:
        """Ask for what the replica lacks; the reply is whole and checked, and not yet applied."""
        request = pb.PullDiffRequest()

        def start(seconds: float) -> StreamCall:
            nonlocal request
            request = self._pull_request(identity)
            call = StreamCall(seconds, policy.limit)
            return call.start(self.connection.stub.PullDiff(request, metadata=trace.headers))

        with tracing.span("pull", shard=self.index) as trace, ProgressLine() as line:
            answer = self.connection.call(
                policy, start, lambda call: self._read_reply(request, call.messages(), policy, line)
            )
            if isinstance(answer, Rejected):
                trace.end(answer.reason.name)
            if not isinstance(answer, Rejected) or answer.reason is not ErrorCode.LEASE_EXPIRED:
                self._partial = None  # else the pull goes on when the worker has joined again
            return answer

    def note_applied(self, reply: PulledReply) -> None:
        """Note that a reply has been written into the replica."""
        self.version, self.has_base = reply.header.version, True
        self.acknowledged_reply = reply.header.reply_number
        self.replica_is_image = reply.header.image

    def _pull_request(self, identity: pb.WorkerIdentity) -> pb.PullDiffRequest:
        request = pb.PullDiffRequest(
            identity=identity,
            generation=self.generation,
            has_base=self.has_base,
            base_version=self.version if self.has_base else 0,
            acknowledged_reply=self.acknowledged_reply,
            image=self.replica_is_image,
            link_bytes_per_second=self.downlink.bytes_per_second or 0.0,
        )
        if self._partial is not None and (self.has_base or self._partial.generation != self.generation):
            self._partial = None
        if self._partial is not None:
            request.has_base, request.base_version, request.base_end = True, self._partial.version, self._partial.end
        return request

    def _read_reply(
        self,
        request: pb.PullDiffRequest,
        responses: Iterator[pb.PullDiffResponse],
        policy: RetryPolicy,
        line: ProgressLine,
    ) -> PulledReply:
        is_whole = not request.has_base or request.base_end
        before, bytes_before = (self._partial.segments, self._partial.bytes) if self._partial is not None else ([], 0)
        reader = frames.ChunkReader(self.span)
        header: pb.PullHeader | None = None
        received, decode_seconds, began = 0, 0.0, math.inf
        for response in responses:
            began = min(began, time.perf_counter())
            received += frames.wire_bytes(response)
            kind = response.WhichOneof("message")
            if kind == "header" and header is None:
                header = response.header
                if header.mode not in (pb.REPLY_MODE_EXACT, pb.REPLY_MODE_TOPK):
                    raise ServerFaultError(f"{self.address} answers in mode {header.mode}; upgrade this client")
            elif kind == "chunk" and header is not None:
                started = time.perf_counter()
                reader.read(response.chunk)
                decode_seconds += time.perf_counter() - started
            elif kind == "so_far" and header is not None:
                reader.checksum.verify(response.so_far)
                policy.progressed()
                if is_whole and reader.position > request.base_end:
                    segments = [*before, *reader.segments]
                    self._partial = _PartialReply(
                        request.generation, header.version, reader.position, segments, received + bytes_before
                    )
                    line.show("fetching the model", (reader.position - self.span.start) / self.span.length)
            elif kind == "commit" and header is not None:
                reader.checksum.verify(response.commit)
                arrived = time.perf_counter()
                self.downlink.update(received, arrived - began - decode_seconds)
                segments = [*before, *reader.segments]
                return PulledReply(
                    header, segments, request.generation, received + bytes_before, decode_seconds, arrived
                )
            else:
                raise ServerFaultError(f"{self.address} sent {kind} out of order in a reply")
        raise Transient("the reply ended without a commit")

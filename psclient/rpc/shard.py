"""One shard as a worker sees it: what it knows of the replica there, and its calls.

Nothing here decides what a failure means for training; each call returns an outcome and :mod:`psclient.rpc.cluster`
acts on it.
"""

import math
import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import grpc

from psclient.buckets.trace import PushTiming
from psclient.compress.groups import Rates
from psclient.errors import ServerFaultError, Transient
from psclient.rpc.bandwidth import Bandwidth
from psclient.rpc.channel import Connection, RetryPolicy
from psclient.rpc.progress_line import WaitLine
from psclient.rpc.stall import Outgoing, Watch
from psclient.settings import AUTO, ClientSettings
from pscore.model.layout import Span
from pscore.model.segment import Segment
from pscore.telemetry import tracing
from pscore.telemetry.span import NO_SPAN, TraceSpan
from pscore.wire import frames
from pscore.wire.codecs.names import INDEX_CODECS, VALUE_CODECS
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

PushCall: TypeAlias = "grpc._CallFuture[pb.PushSparseResponse]"
PullCall: TypeAlias = "grpc._CallIterator[pb.PullDiffResponse]"

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


@dataclass(slots=True)
class PushPart:
    """One shard's part of a push, kept until it is acknowledged or refused.

    Attributes:
        step: the worker's step.
        generation: of the model it was made for.
        messages: what is sent; the same bytes at each attempt.
        segments: the payload as it arrives, for giving it back.
        timing: when the groups of the plan left, and what they weigh, for measuring the link.
        trace: from the header to the answer, over all attempts.
    """

    step: int
    generation: int
    timing: PushTiming
    messages: list[pb.PushSparseRequest] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    checksum: frames.Checksum = field(default_factory=frames.Checksum)
    bytes: int = 0
    trace: TraceSpan = NO_SPAN


@dataclass(slots=True)
class PulledReply:
    """A whole, checked reply.

    Attributes:
        header: the server's words about it.
        segments: its entries.
        generation: of the model it is from.
        bytes: message bytes received.
        decode_seconds: time spent on reading the entries.
        arrived: when it was whole, :func:`time.perf_counter`.
    """

    header: pb.PullHeader
    segments: list[Segment]
    generation: int
    bytes: int
    decode_seconds: float
    arrived: float


class _Begun(NamedTuple):
    """What has come, whole and checked, of a reply of everything that was cut.

    Attributes:
        generation: of the model.
        version: that the elements before ``end`` have.
        end: index behind them.
        segments: their values; where two have the same element, the later one holds.
        bytes: message bytes received.
    """

    generation: int
    version: int
    end: int
    segments: list[Segment]
    bytes: int


class ShardClient:
    """The calls to one shard, and the state of the replica with respect to it."""

    def __init__(self, connection: Connection, index: int, settings: ClientSettings) -> None:
        """Prepare; nothing is dialled yet."""
        self.connection = connection
        self.lease_connection = connection.twin()
        self.index = index
        self.settings = settings
        self.span = Span(0, 0)
        self.generation = 0
        self.version = 0
        self.has_base = False
        self.acknowledged_reply = 0
        self.replica_is_image = False
        self.in_doubt: PushPart | None = None
        self.readable: frozenset[int] = frozenset()
        self.uplink, self.downlink = Bandwidth(), Bandwidth()
        self.timing = PushTiming.of(0)
        self._live: queue.SimpleQueue[pb.PushSparseRequest | None] | None = None
        self._call: PushCall | None = None
        self.outgoing = Watch(settings.deadline_seconds)  # of the push, or the upload, that is under way
        self._received_bytes = 0  # of these, as the server has said last
        self.sent_model: tuple[int, int] | None = None  # generation and version of an upload that is not answered
        self._begun: _Begun | None = None

    @property
    def address(self) -> str:
        """``HOST:PORT``, or another name of it."""
        return self.connection.address

    def close(self) -> None:
        """Close both channels."""
        self.outgoing.end()
        self.connection.close()
        self.lease_connection.close()

    def heard(self, received_bytes: int, *, is_at_work: bool) -> None:
        """Note how much the server has got of this worker's streams, and whether it is at work on a model."""
        if received_bytes != self._received_bytes or is_at_work:
            self._received_bytes = received_bytes
            self.outgoing.heard()

    def adopt(self, generation: int, *, version: int | None = None) -> None:
        """Note the shard's generation; with ``version``, that the replica is the model at that version there."""
        if generation != self.generation:
            self.generation = generation
            self.forget_base()
            if self.sent_model is not None and self.sent_model[0] == generation:
                version = self.sent_model[1]  # it was taken, and the answer is lost
            self.sent_model = None
        if version is not None:
            self.version, self.has_base = version, True
        if not self.has_base:
            self.forget_base()

    def forget_base(self) -> None:
        """Note that the replica is not the model at any version: the next pull asks for everything."""
        self.has_base = False
        self.acknowledged_reply, self.replica_is_image = 0, False

    # Push

    @property
    def push_form(self) -> frames.WireForm:
        """How a push to this shard is written now."""
        index = self.settings.index_codec
        return frames.WireForm(
            value=VALUE_CODECS[self.settings.value_type],
            index=None if index == AUTO else INDEX_CODECS[index],
            allowed=self.readable,
            link_bytes_per_second=self.uplink.bytes_per_second,
        )

    def open_push(
        self,
        identity: pb.WorkerIdentity,
        step: int,
        samples: int,
        rates: Rates,
        plan: list[Span],
        finished: list[pb.FinishedSamples],
    ) -> None:
        """Begin to stream a push: the header goes out now, chunks as they are handed in."""
        generation = self.generation  # read once: a fetch on another thread may join again
        self.timing = PushTiming.of(len(plan))
        trace = tracing.begin("push", shard=self.index)
        self.in_doubt = PushPart(step, generation, self.timing, trace=trace)
        self._live = queue.SimpleQueue()
        self.outgoing = Watch(self.settings.deadline_seconds)
        self._call = self._push(iter(self._live.get, None), self.outgoing, trace)
        header = pb.PushHeader(
            identity=identity,
            step=step,
            generation=generation,
            base_version=self.version,
            samples=samples,
            learning_rate=rates.carried,
            group_rates=rates.of_groups,
            plan=[pb.Group(start=group.start, length=group.length) for group in plan],
            finished=finished,
        )
        self.timing.opened = time.perf_counter()
        self._send(pb.PushSparseRequest(header=header))

    def _push(
        self, messages: Iterator[pb.PushSparseRequest], watch: Watch, trace: TraceSpan
    ) -> "grpc._CallFuture[pb.PushSparseResponse]":
        """Begin a call that lasts as long as its messages move."""
        return watch.follow(self.connection.stub.PushSparse.future(Outgoing(messages, watch), metadata=trace.headers))

    def send_chunk(self, chunk: pb.Chunk) -> None:
        """Hand one chunk to the stream."""
        assert self.in_doubt is not None
        self.in_doubt.checksum.add(chunk)
        timing = self.in_doubt.timing
        timing.group_bytes[chunk.group] += frames.wire_bytes(pb.PushSparseRequest(chunk=chunk))
        self._send(pb.PushSparseRequest(chunk=chunk))
        timing.left[chunk.group] = time.perf_counter() - timing.opened

    def hold(self, segment: Segment) -> None:
        """Remember a piece of the payload, for giving it back."""
        assert self.in_doubt is not None
        self.in_doubt.segments.append(segment)

    def send_commit(self) -> int:
        """End the stream; return the message bytes of the whole push."""
        assert self.in_doubt is not None
        assert self._live is not None
        self._send(pb.PushSparseRequest(commit=self.in_doubt.checksum.commit()))
        self._live.put(None)
        self._live = None
        return self.in_doubt.bytes

    def abandon_push(self) -> PushPart | None:
        """Break a push off before its commit: nothing of it can have been applied."""
        part, self.in_doubt = self.in_doubt, None
        if part is not None:
            part.trace.end("abandoned")
        self.outgoing.end()
        if self._live is not None:
            self._live.put(None)
        self._live, self._call = None, None
        return part

    def settle(self, patience: RetryPolicy) -> pb.PushSparseResponse | Rejected | None:
        """End the doubt about the last push: its answer, its refusal, or ``None`` if there was none in doubt.

        Raises:
            ServerUnreachableError: no answer within the patience; the part stays in doubt.
        """
        part = self.in_doubt
        if part is None:
            return None

        def start(seconds: float) -> PushCall:
            call, self._call = self._call, None  # the one that began with the push, and then one for each attempt
            if call is None:
                self.outgoing = Watch(seconds)
                call = self._push(iter(part.messages), self.outgoing, part.trace)
            self.outgoing.limit = patience.limit
            return call

        streamed = self._call
        answer: tuple[bool, pb.PushSparseResponse] | Rejected
        answer = self.connection.ask(patience, start, lambda call: (call is streamed, self.outgoing.result(call)))
        if isinstance(answer, Rejected):
            if answer.reason is not ErrorCode.LEASE_EXPIRED:  # else it is repeated, after joining
                part.trace.end(answer.reason.name)
            return answer
        at_first, response = answer
        if at_first and not response.repeated_push:
            part.timing.arrived = _seconds(response)
        self._measure(part, response)
        self.in_doubt = None
        part.trace.note(version=response.version, staleness=response.staleness)
        part.trace.end()
        return response

    def _measure(self, part: PushPart, response: pb.PushSparseResponse) -> None:
        """Learn the speed of the way up: a group cannot have taken longer than since the group before it was whole."""
        before = 0.0
        for nbytes, arrival in zip(part.timing.group_bytes, _seconds(response), strict=False):
            self.uplink.saw(nbytes, arrival - before)
            before = max(before, arrival)

    def _send(self, message: pb.PushSparseRequest) -> None:
        assert self.in_doubt is not None
        assert self._live is not None
        self.in_doubt.messages.append(message)
        self.in_doubt.bytes += frames.wire_bytes(message)
        self._live.put(message)

    # Pull

    def pull(self, identity: pb.WorkerIdentity, patience: RetryPolicy) -> PulledReply | Rejected:
        """Ask for what the replica lacks; the reply is whole and checked, and not yet applied.

        Raises:
            ServerUnreachableError: no whole reply within the patience.
            ServerFaultError: the reply breaks the protocol.
        """
        request, watch = pb.PullDiffRequest(), Watch(patience.timeout)

        def start(seconds: float) -> PullCall:
            nonlocal request, watch
            request, watch = self._pull_request(identity), Watch(seconds, patience.limit)
            return watch.follow(self.connection.stub.PullDiff(request, metadata=trace.headers))

        with tracing.span("pull", shard=self.index) as trace, WaitLine() as line:
            answer = self.connection.ask(
                patience, start, lambda call: self._read_reply(request, watch.messages(call), patience, line)
            )
            if isinstance(answer, Rejected):
                trace.end(answer.reason.name)
            if not isinstance(answer, Rejected) or answer.reason is not ErrorCode.LEASE_EXPIRED:
                self._begun = None  # else the pull goes on when the worker has joined again
            return answer

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
        if self._begun is not None and (self.has_base or self._begun.generation != self.generation):
            self._begun = None
        if self._begun is not None:
            request.has_base, request.base_version, request.base_end = True, self._begun.version, self._begun.end
        return request

    def applied(self, reply: PulledReply) -> None:
        """Note that a reply has been written into the replica."""
        self.version, self.has_base = reply.header.version, True
        self.acknowledged_reply = reply.header.reply_number
        self.replica_is_image = reply.header.image

    def _read_reply(
        self,
        request: pb.PullDiffRequest,
        responses: Iterator[pb.PullDiffResponse],
        patience: RetryPolicy,
        line: WaitLine,
    ) -> PulledReply:
        begun, is_whole = self._begun, not request.has_base or request.base_end
        before = begun.segments if begun is not None else []
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
                patience.progressed()
                if is_whole and reader.position > request.base_end:
                    self._begun = _Begun(
                        request.generation, header.version, reader.position, [*before, *reader.segments], received
                    )
                    line.show("fetching the model", (reader.position - self.span.start) / self.span.length)
            elif kind == "commit" and header is not None:
                reader.checksum.verify(response.commit)
                arrived = time.perf_counter()
                self.downlink.saw(received, arrived - began - decode_seconds)
                received += begun.bytes if begun is not None else 0
                segments = [*before, *reader.segments]
                return PulledReply(header, segments, request.generation, received, decode_seconds, arrived)
            else:
                raise ServerFaultError(f"{self.address} sent {kind} out of order in a reply")
        raise Transient("the reply ended without a commit")


def _seconds(response: pb.PushSparseResponse) -> list[float]:
    """Return when each group was whole, seconds after the header."""
    return [nanoseconds / 1e9 for nanoseconds in response.group_arrival_nanoseconds]

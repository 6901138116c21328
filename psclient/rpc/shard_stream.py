"""A client of one shard: pushes, pulls, uploads, and how far the replica follows the shard.

Each call returns an outcome; :mod:`psclient.engine.engine` decides what a failure means for the training.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from psclient.errors import ServerFaultError
from psclient.rpc.channel import Connection, RetryPolicy
from psclient.rpc.progress_line import ProgressLine
from psclient.rpc.stream import Bandwidth, Octets, Stream
from psclient.settings import ClientSettings
from pscore.model.dense_place import DensePlace
from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice, entries
from pscore.wire import frames
from pscore.wire.budget import FEWEST_BYTES, Fit, is_less_dense, roomiest
from pscore.wire.codecs.names import INDEX_CODECS, VALUE_CODECS
from pscore.wire.dense import (
    MessageSize,
    bytes_of,
    chunk_field,
    chunk_message,
    cut,
    dense_chunk,
    field_bytes,
    fields,
    message_bytes,
    split_values,
)
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.histories import goes_on
from pscore.wire.v1 import parameter_server_pb2 as pb

_TOGETHER_BYTES = 16 << 10  # of fields of a push that are sent together on any link
_TOGETHER_SECONDS = 0.02  # that the fields sent together may take on the link
_MOST_TOGETHER = 64  # parts of fields


def bytes_together(link_bytes_per_second: float | None) -> int:
    """Return how many bytes of fields are sent together: few, or as many as the link carries in a moment."""
    return max(_TOGETHER_BYTES, message_bytes(link_bytes_per_second, _TOGETHER_SECONDS))


@dataclass(slots=True)
class PushPart:
    """One shard's part of a push, kept until it is acknowledged or refused.

    ``stream`` has what is sent, until an attempt to read the answer has failed; later attempts send ``messages``, the
    same bytes: in parts, so that values which travel as they are exist once. ``segments`` is the payload as it arrives,
    for restoring it. Fields are sent together until they have ``together_bytes``. ``group_bytes`` are those of each
    group's chunks, by place in the plan.
    """

    generation: int
    stream: Stream | None
    together_bytes: int
    group_bytes: list[int]
    messages: list[Octets] = field(default_factory=list)
    segments: list[SparseSlice] = field(default_factory=list)
    checksum: frames.Checksum = field(default_factory=frames.Checksum)
    nbytes: int = 0
    _pending: list[bytes | memoryview] = field(default_factory=list)
    _pending_bytes: int = 0

    def add(self, *parts: bytes | memoryview, group: int | None = None) -> int:
        """Add a serialised field of :class:`pb.PushSparseRequest`, in parts end to end; return its bytes.

        ``group`` is the one that a field is a chunk of.
        """
        size, most = sum(map(len, parts)), self.together_bytes
        if self._pending and self._pending_bytes + size > most:
            self.flush()
        self._pending += parts
        self._pending_bytes += size
        if group is not None:
            self.group_bytes[group] += size
        if self._pending_bytes >= most or len(self._pending) >= _MOST_TOGETHER:
            self.flush()
        return size

    def go_on_in(self, generation: int) -> None:
        """Have the push be of another generation when it is sent again; the stream before is given up."""
        self.generation, self.stream = generation, None
        if not self.messages:
            return
        first, *others = self.messages[0]
        number, start, end = next(fields(bytes(first)))
        assert (number, end) == (pb.PushSparseRequest.HEADER_FIELD_NUMBER, len(first))
        header = pb.PushHeader.FromString(bytes(first[start:end]))
        header.generation = generation
        self.messages[0] = (field_bytes(number, header), *others)

    def flush(self) -> None:
        """Send what has been added."""
        message = tuple(self._pending)
        self.nbytes += self._pending_bytes + frames.FRAMING_BYTES
        self._pending.clear()
        self._pending_bytes = 0
        self.messages.append(message)
        if self.stream is not None:
            self.stream.send(message)


_LEAST_UPLOAD_BYTES = 256 << 10  # of a chunk: what one second brings on a line of 2 Mbit/s, and what a cut loses
WAIT_SHARE = 0.5
"""Of the time without a message after which a call counts as lost: the server may hold the answer back for so long."""
_PIECE_ELEMENTS = 4 << 20  # that are copied to the host, as fp32, at a time


@dataclass(slots=True)
class PulledReply:
    """A verified reply. After a broken stream: the verified prefix, up to element ``end``.

    If two segments have the same element, the later one counts. ``bytes`` are those of messages, ``arrived`` is of
    :func:`time.perf_counter`. ``spilled`` entries have been written already, and are in no segment.
    """

    header: pb.PullHeader
    segments: list[SparseSlice]
    generation: int
    end: int
    bytes: int
    decode_seconds: float
    arrived: float
    spilled: int = 0


class _Asked(NamedTuple):
    """A pull whose request is sent, on its stream."""

    stream: Stream
    request: pb.PullDiffRequest


class EncodedPart(NamedTuple):
    """A part of a push as it is sent.

    Attributes:
        chunks: each alone, or without value bytes and with these beside.
        arriving: the part as the server will decode it.
        lost: what rounding takes from it; ``None`` for nothing.
    """

    chunks: Sequence[tuple[pb.Chunk] | tuple[pb.Chunk, memoryview]]
    arriving: SparseSlice
    lost: SparseSlice | None


class Uploaded(Protocol):
    """The values that a worker brings to a server that has none."""

    @property
    def layout(self) -> ModelLayout:
        """Of the model."""

    def read(self, span: Span) -> Iterable[SparseSlice]:
        """Return the values of a span: fp32, or words of a feed."""

    def digest(self) -> bytes:
        """Return 32 bytes that are equal if the values are, and else all but surely not."""

    def not_finite(self) -> str | None:
        """Return the name of a tensor that has values with which no run begins."""


class ShardStream:
    """The calls of one shard, which has ``span``, and the state of the replica with respect to it.

    Attributes:
        has_base: whether the replica is the model at ``version``, or with ``replica_is_image`` the image of it there.
        joined_version: of the shard, as of the last join.
        origins: of the shard's history of versions, as of the last join.
        seen: what the other shards knew of this one at the last join.
        unacked: the part of the last push that is neither acknowledged nor refused.
        readable: the index codecs that the server reads.
        outgoing: the push or upload that is under way.
        sent_model: generation and version of an upload that is not answered.
        group_bytes: of each group of the last push that was answered, by place in its plan.
        group_arrivals: when each was whole at the server, seconds after the header; empty after a repetition.
        pushes_all: whether the pushes have every entry, and no budget has chosen another form of replies.
        spill: writes the verified beginning of a whole reply into the replica, so that nobody holds all of it;
            ``None``: the reply is held until it is whole.
        room: returns memory, fp32 ``[span.length]`` on the host, for the dense values of a reply that is held;
            ``None``: each chunk's values have memory of their own.
    """

    def __init__(self, connection: Connection, index: int, span: Span, settings: ClientSettings) -> None:
        self.connection, self.address = connection, connection.address
        self.lease_connection = connection.twin()
        self.index, self.span = index, span
        self.generation = self.version = self.acknowledged_reply = self.joined_version = 0
        self.has_base = self.replica_is_image = False
        self.origins: Sequence[pb.ShardOrigin] = ()
        self.seen: Sequence[pb.ShardHistory] = ()
        self.unacked: PushPart | None = None
        self.readable: frozenset[int] = frozenset()
        self.downlink, self.uplink = Bandwidth(), Bandwidth()
        self.group_bytes: list[int] = []
        self.group_arrivals: list[float] = []
        self.outgoing: Stream | None = None
        self._pushes: Stream | None = None
        self._pulls: Stream | None = None
        self._asked: _Asked | None = None
        self._pull_parent = ""  # of the pull that is asked for, in a trace
        self.sent_model: tuple[int, int] | None = None
        self.pushes_all = False
        self._push_form: Fit | None = None  # none: no budget, but the value type of the settings
        self.spill: Callable[[Sequence[SparseSlice]], None] | None = None
        self.room: Callable[[Span], torch.Tensor | None] = lambda _: None
        self._reply_form: Fit | None = None  # none: the server's settings
        codec = INDEX_CODECS.get(settings.index_codec)  # none: "auto"
        self._form = frames.WireForm(VALUE_CODECS[settings.value_type], codec)
        self._received_bytes = 0  # of the outgoing streams, as the server has said last
        self._partial: PulledReply | None = None  # of everything

    def close(self) -> None:
        """Close both channels."""
        if self.outgoing is not None:
            self.outgoing.close()
        self._drop_pushes()
        self.drop_pull()
        self.connection.close()
        self.lease_connection.close()

    def note_receipt(self, received_bytes: int, *, installing: bool) -> None:
        """Note how many bytes of this worker's streams the server has, and whether the server installs a model."""
        if received_bytes != self._received_bytes or installing:
            self._received_bytes = received_bytes
            if (outgoing := self.outgoing) is not None:
                outgoing.note_receipt()

    def adopt(self, generation: int, *, version: int | None = None) -> None:
        """Note the shard's generation; with ``version``, that the replica is the model at that version there.

        If the shard's history goes on from what this worker has, as that of a standby does, so does the worker: it
        keeps its base, and a push without an answer is sent again, which the shard knows if it has applied that one.
        """
        if generation != self.generation and goes_on(self.origins, self.generation, self.version):
            self.generation = generation
            if self.unacked is not None:
                self.unacked.go_on_in(generation)
        elif generation != self.generation:
            self.forget_base()  # first: another thread reads what the worker has of the shard
            self.generation = generation
            if self.sent_model is not None and self.sent_model[0] == generation:
                version = self.sent_model[1]  # the server has the upload, and its answer is lost
            self.sent_model = None
        if version is not None:
            self.forget_base()
            self.version, self.has_base = version, True

    def history(self) -> pb.ShardHistory | None:
        """Return the newest version of the shard that this worker or another shard has seen; from any thread."""
        generation, has_base, version = self.generation, self.has_base, self.version
        if not has_base or not self.has_base or generation != self.generation:
            version = 0
        version = max([version, *(known.version for known in self.seen if known.generation == generation)])
        if not version:
            return None
        return pb.ShardHistory(shard_index=self.index, generation=generation, version=version, origins=self.origins)

    def forget_base(self) -> None:
        """Note that the replica is not the model at any version: the next pull asks for everything."""
        self.has_base = False
        self.acknowledged_reply, self.replica_is_image = 0, False

    # Push

    def use_forms(self, push: Fit, reply: Fit) -> None:
        """Write pushes in a form, or with more bits if there are few entries, and ask for replies of a form.

        All take the fewest bytes.
        """
        self._push_form, self._reply_form = push, reply

    def encode(self, part: SparseSlice, group: int, chunk_bytes: int, *, exact: bool) -> EncodedPart:
        """Write a part of a push, as group number ``group`` of its plan; ``exact``: in fp32, whatever was asked for.

        The part's values are referred to until they are sent, or overwritten by those that arrive.
        """
        value, rate, budgeted = self._form.value, self.uplink.bytes_per_second, self._push_form
        if budgeted is not None:
            rate = FEWEST_BYTES
        if exact:
            value = pb.VALUE_CODEC_FP32
        elif budgeted is not None and is_less_dense(part, budgeted.value):
            part, value = part.everywhere(), budgeted.value
        elif budgeted is not None:
            value = roomiest(part, budgeted)
        form = frames.WireForm(value, self._form.index, self.readable, rate)
        if value == pb.VALUE_CODEC_FP32:
            data = bytes_of(part.values.float())
            chunks = frames.chunks_without_values(part, form, chunk_bytes, group)
            beside = [(chunk, data[4 * first : 4 * (first + chunk.count)]) for chunk, first in chunks]
            return EncodedPart(beside, part, None)
        encoded = list(frames.encode(part, form, chunk_bytes=chunk_bytes, group=group))
        return EncodedPart([(chunk,) for chunk, _ in encoded], *as_decoded(part, encoded))

    def open_push(self, header: pb.PushHeader, plan: list[Span], idle_seconds: float) -> None:
        """Begin to stream a push; ``header`` lacks generation, version and plan, which are this shard's."""
        header.generation = self.generation  # read once: a fetch on another thread may join again
        header.base_version = self.version
        header.wait_seconds = idle_seconds * WAIT_SHARE
        header.plan.extend(pb.Group(start=group.start, length=group.length) for group in plan)
        together, stream = bytes_together(self.uplink.bytes_per_second), self._push_stream(idle_seconds)
        self.unacked = PushPart(header.generation, stream, together, [0] * len(plan))
        self.unacked.add(field_bytes(pb.PushSparseRequest.HEADER_FIELD_NUMBER, header))

    def _push_stream(self, idle_seconds: float) -> Stream:
        """Return the open stream of pushes, for another request."""
        if self._pushes is None or not self._pushes.is_open:
            self._drop_pushes()
            self._pushes = Stream(self.connection.pushes)
        self._pushes.begin(idle_seconds)
        self.outgoing = self._pushes
        return self._pushes

    def _drop_pushes(self) -> None:
        if self._pushes is not None:
            self._pushes.close()
            self._pushes = None

    @property
    def _open_part(self) -> PushPart:
        assert self.unacked is not None
        return self.unacked

    def send(self, encoded: EncodedPart) -> None:
        """Send chunks of the open push."""
        part = self._open_part
        for chunk, *values in encoded.chunks:
            part.checksum.add(chunk, *values)
            part.add(*chunk_field(chunk, *values), group=chunk.group)

    def hold(self, segment: SparseSlice) -> None:
        """Keep a piece of the open push's payload, for restoring it."""
        self._open_part.segments.append(segment)

    def send_commit(self) -> int:
        """End the push; return the message bytes of the whole of it."""
        part = self._open_part
        part.add(field_bytes(pb.PushSparseRequest.COMMIT_FIELD_NUMBER, part.checksum.commit()))
        part.flush()
        return part.nbytes

    def abandon_push(self) -> list[PushPart]:
        """Break off a push that has no commit, if one is open: nothing of it can have been applied."""
        part, self.unacked = self.unacked, None
        if part is None:
            return []
        self._drop_pushes()
        return [part]

    def await_ack(self, policy: RetryPolicy) -> pb.PushSparseResponse | Rejected:
        """Wait for the answer to the unacked part, which stays unacked if there is none in time."""
        part, first = self._open_part, self._open_part.stream

        def attempt(seconds: float) -> tuple[Stream, pb.PushSparseResponse]:
            stream, part.stream = part.stream, None
            if stream is None:
                stream = self._push_stream(seconds)
                for message in part.messages:
                    stream.send(message)
            try:
                with self.connection.tracked(stream):
                    return stream, stream.receive(seconds, policy.limit)
            except BaseException:
                self._drop_pushes()
                self.drop_pull()  # it would wait for a push that may never be applied
                raise

        answer = self.connection.call(policy, attempt)
        if isinstance(answer, Rejected):
            return answer
        stream, response = answer
        arrivals = [nanoseconds / 1e9 for nanoseconds in response.group_arrival_nanoseconds]  # after the header
        self.group_bytes = part.group_bytes
        self.group_arrivals = arrivals if stream is first and not response.repeated_push else []
        before = 0.0
        with_header = sum(map(len, part.messages[0]))  # bytes that were there with the header count for no time
        for nbytes, arrival in zip(part.group_bytes, arrivals, strict=False):
            early = min(nbytes, with_header)
            self.uplink.update(nbytes - early, arrival - before)  # not longer than since the group before was whole
            before, with_header = max(before, arrival), with_header - early
        self.unacked = None
        return response

    # Pull

    def ask(self, identity: pb.WorkerIdentity, step: int, idle_seconds: float) -> None:
        """Send the request of the next :meth:`pull` ahead: answered once the push of ``step`` is applied."""
        if self._asked is not None:
            self.drop_pull()
        self._asked = self._send_request(identity, step, idle_seconds)

    def drop_pull(self) -> None:
        """End the stream of pulls, and what is on it."""
        self._asked = None
        if self._pulls is not None:
            self._pulls.close()
            self._pulls = None

    def pull(self, identity: pb.WorkerIdentity, policy: RetryPolicy) -> PulledReply | Rejected:
        """Fetch the changes that the replica lacks; the reply is whole and checked, and not yet applied."""
        with nullcontext() if self.has_base else ProgressLine() as line:

            def attempt(seconds: float) -> PulledReply:
                asked, self._asked = self._asked, None
                if asked is None or not asked.stream.is_open or asked.request != self._pull_request(identity):
                    if asked is not None:
                        self.drop_pull()  # its answer may lie in the stream
                    asked = self._send_request(identity, 0, seconds)
                try:
                    with self.connection.tracked(asked.stream):
                        messages = iter(lambda: asked.stream.receive(seconds, policy.limit), None)
                        return self._read_reply(asked.request, messages, policy, line)
                except BaseException:
                    self.drop_pull()
                    raise

            answer = self.connection.call(policy, attempt)
        if not isinstance(answer, Rejected) or answer.reason is not ErrorCode.LEASE_EXPIRED:
            self._partial = None  # else the pull goes on when the worker has joined again
        return answer

    def _send_request(self, identity: pb.WorkerIdentity, step: int, idle_seconds: float) -> _Asked:
        if self._pulls is None or not self._pulls.is_open:
            self.drop_pull()
            self._pulls = Stream(self.connection.pulls)
        self._pulls.begin(idle_seconds)
        request = self._pull_request(identity)
        behind = pb.PullDiffRequest(
            after_step=step,
            traceparent=self._pull_parent,
            link_bytes_per_second=self.downlink.bytes_per_second or 0.0,
            wait_seconds=idle_seconds * WAIT_SHARE,
        )
        if self._reply_form is not None:
            behind.density, behind.value_codec = self._reply_form  # type: ignore[assignment]
        self._pulls.send((request.SerializeToString(), behind.SerializeToString()))
        return _Asked(self._pulls, request)

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
            pushes_all=self.pushes_all and self._reply_form is None,
        )
        if self._partial is not None and (self.has_base or self._partial.generation != self.generation):
            self._partial = None
        if self._partial is not None:
            request.has_base, request.base_end = True, self._partial.end
            request.base_version = self._partial.header.version
        return request

    def _read_reply(
        self,
        request: pb.PullDiffRequest,
        messages: Iterator[bytes],
        policy: RetryPolicy,
        line: ProgressLine | None,
    ) -> PulledReply:
        is_whole = not request.has_base or request.base_end
        before, bytes_before = (self._partial.segments, self._partial.bytes) if self._partial is not None else ([], 0)
        spilled = self._partial.spilled if self._partial is not None else 0
        reader, place = frames.ChunkReader(self.span), DensePlace(self.span, lambda: self.room(self.span))
        header = pb.PullHeader()  # without a mode until the server's is there
        received, first_bytes, decode_seconds, began = 0, 0, 0.0, math.inf

        def reply() -> PulledReply:
            segments, nbytes = [*before, *reader.segments], bytes_before + received
            end, now = reader.position, time.perf_counter()
            return PulledReply(header, segments, request.generation, end, nbytes, decode_seconds, now, spilled)

        for data in messages:
            received += len(data) + frames.FRAMING_BYTES
            if not first_bytes:
                began, first_bytes = time.perf_counter(), received
            rest, values = split_values(data, several=True)
            response = pb.PullDiffResponse.FromString(rest)
            if response.HasField("header"):
                if header.mode:
                    raise ServerFaultError(f"{self.address} sent a second header inside a reply")
                header = response.header
                if header.mode not in (pb.REPLY_MODE_EXACT, pb.REPLY_MODE_TOPK):
                    raise ServerFaultError(f"{self.address} answers in mode {header.mode}; upgrade this client")
            if not header.mode:
                raise ServerFaultError(f"{self.address} sent a reply without its header")
            started = time.perf_counter()
            for number, chunk in enumerate(response.chunks):
                reader.segments[-1] = place.moved(reader.read(chunk, *values[number : number + 1]))
            decode_seconds += time.perf_counter() - started
            if response.HasField("so_far"):
                reader.checksum.verify(response.so_far)
                policy.progressed()
                if is_whole and self.spill is not None and header.mode == pb.REPLY_MODE_EXACT:
                    self.spill(reader.segments)
                    spilled += entries(reader.segments)
                    reader.segments.clear()
                if is_whole and reader.position > request.base_end:
                    self._partial = reply()
                    if line is not None:
                        line.show("fetching the model", (reader.position - self.span.start) / self.span.length)
            if response.HasField("commit"):
                reader.checksum.verify(response.commit)
                whole = reply()
                self.downlink.update(received - first_bytes, whole.arrived - began - decode_seconds)
                return whole
        raise AssertionError("a stream raises where it ends")

    # Upload

    def upload(
        self,
        header: pb.UploadHeader,
        replica: Uploaded,
        buffers: bytes,
        chunk_bytes: int,
        moved: Callable[[int, int], None],
        policy: RetryPolicy,
    ) -> pb.UploadModelResponse | Rejected:
        """Send the part of the shard's span, and of the packed ``buffers``, that the server does not have yet.

        ``moved`` is called after each message with the elements sent until then, and the message's bytes.
        """
        request = pb.UploadModelRequest(header=header).SerializeToString()
        least = min(chunk_bytes, _LEAST_UPLOAD_BYTES)

        runs = replica.layout.dtype_runs(self.span)

        def values(span: Span, dtype: torch.dtype) -> list[memoryview]:
            return [bytes_of(segment.values.to(dtype)) for segment in replica.read(span)]

        def known_part(known: pb.Commit) -> frames.Checksum:
            """Return the checksum of what the server has; of nothing if that is not the beginning of this model."""
            checksum, begun = frames.Checksum(), Span(self.span.start, self.span.start + known.entries)
            for dtype, run in runs:
                for part in cut(run.intersect(begun), _PIECE_ELEMENTS):
                    checksum.add(pb.Chunk(count=part.length), *values(part, dtype))
            checksum.chunks = known.chunks
            return checksum if checksum.commit() == known else frames.Checksum()

        def messages(known: pb.UploadModelResponse) -> Iterator[bytes]:
            yield request
            checksum, size = known_part(known.received), MessageSize(least)
            known_bytes = known.received_buffer_bytes if checksum.entries else 0
            for dtype, run in runs:
                while (start := self.span.start + checksum.entries) < run.end:
                    part = Span(start, min(run.end, start + size.nbytes // dtype.itemsize))
                    chunk, data = dense_chunk(part, dtype), values(part, dtype)
                    checksum.add(chunk, *data)
                    message = chunk_message(chunk, *data)
                    yield message
                    policy.progressed()
                    moved(checksum.entries, len(message) + frames.FRAMING_BYTES)
                    size.sent(len(message))
            for piece in frames.encode_bytes(buffers, least):
                if piece.offset >= known_bytes:
                    yield pb.UploadModelRequest(buffers=piece).SerializeToString()
            self.sent_model = header.generation, header.version
            yield pb.UploadModelRequest(commit=checksum.commit()).SerializeToString()

        def answer(sent: Iterator[bytes], seconds: float) -> pb.UploadModelResponse:
            stream = self.outgoing = Stream(self.connection.uploads, sent)
            try:
                with self.connection.tracked(stream):
                    received: pb.UploadModelResponse = stream.receive(seconds, policy.limit)
                    return received
            finally:
                stream.close()

        def attempt(seconds: float) -> pb.UploadModelResponse:
            return answer(messages(answer(iter((request,)), seconds)), seconds)

        return self.connection.call(policy, attempt)


def as_decoded(part: SparseSlice, encoded: Sequence[frames.Encoded]) -> tuple[SparseSlice, SparseSlice | None]:
    """Return the part as the server will decode it, and the quantisation error if there is one.

    The part's values, fp32, become those that arrive, in place: a push has them once.
    """
    decoded = [piece.decoded for piece in encoded]
    values = (decoded[0] if len(decoded) == 1 else torch.cat(decoded)).to(part.values.device)
    error = part.values - values
    part.values.copy_(values)
    lossy = int(torch.count_nonzero(error))
    if part.offsets is None or 2 * lossy > error.numel():  # to find most of them costs more than zeros among them
        return part, SparseSlice(part.span, part.offsets, error) if lossy else None
    where = error.nonzero().view(-1)
    return part, SparseSlice(part.span, part.offsets[where], error[where]) if lossy else None

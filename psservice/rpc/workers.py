"""The calls of workers: messages to calls of the shard and back, and nothing else.

A handler runs in a thread of its lane, on messages that :func:`psservice.rpc.calls.check` has accepted. One that reads
a stream is a generator (:mod:`psservice.state.stream_readers`); until its first message it runs on the event loop and
must not wait.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from pscore.model.buffers import pack, packed_bytes
from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.telemetry import tracing
from pscore.telemetry.span import NO_SPAN
from pscore.telemetry.tracing import traced
from pscore.wire import frames
from pscore.wire.codecs.names import (
    PLAIN_VALUE_CODECS,
    READABLE_INDEX_CODECS,
    READABLE_VALUE_CODECS,
    VALUE_CODECS,
)
from pscore.wire.dense import MessageSize, bytes_of, chunk_message, field_bytes
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.generation import epoch
from pscore.wire.messages import place_of
from pscore.wire.protocol import common_protocol
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.awaiting import NotYetError
from psservice.data_leases.codec import answer_to_message, finished_of, sample_request_of
from psservice.membership.leases import Member
from psservice.memory_budget import Reservation, default_limit
from psservice.replies.reply_session import PullRequest, Reply
from psservice.rpc.calls import Call, LastStep, require_place
from psservice.rpc.charges import largest_stream
from psservice.rpc.status import REPLY_MODES, run_settings
from psservice.shard import model_install
from psservice.shard.buffers import exchange_buffers, open_exchange
from psservice.shard.following import RUN_STATES
from psservice.shard.join import JoinLayouts, hear_of_shards, join, leave
from psservice.shard.lifecycle import close_rounds_after_leave
from psservice.shard.publication import publish
from psservice.shard.pull import pull
from psservice.shard.push import check_push, prepare_push
from psservice.shard.samples import lease_samples
from psservice.shard.shard import Shard
from psservice.shard.upload import Upload
from psservice.shard.wait_for_all import is_over, wait_for_all
from psservice.state.stream_readers import Reading, header_of, read_push, require_end
from psservice.values import Identity, identity_from_message

_MOST_NAMES = 1000  # of workers, in an answer

_TOGETHER_BYTES = 64 << 10  # of a message that others may be put before or behind


class WorkerCalls:
    """The calls of workers over one shard; each method serves the call that it is named after."""

    def __init__(self, shard: Shard) -> None:
        self._shard, self._settings, self._metrics = shard, shard.settings, shard.metrics
        self._layouts = JoinLayouts(shard)
        self._memory = shard.memory
        self._limited: tuple[ModelLayout | None, tuple[int, int]] | None = None  # of a layout
        self._metrics.bytes_in_flight.set_function(lambda: self._memory.in_flight + shard.uploads.nbytes)
        self._metrics.memory_bytes.set_function(lambda: self._memory.total + shard.uploads.nbytes)
        self._metrics.memory_bytes_limit.set_function(self._most)
        self._metrics.bytes_in_flight_limit.set_function(self._most_in_flight)

    def join(self, call: Call, request: pb.JoinRequest) -> pb.JoinResponse:
        """Grant a lease; the answer may wait for the end of the name's former lease, and for a model."""
        shard = self._shard
        protocol = common_protocol(request.protocol_version, request.newest_protocol_version)
        identity = identity_from_message(request.identity)
        shard.run.require_id(request.identity.run_id, may_be_empty=True)
        require_place(self._settings, place_of(request.shard_index, request.num_shards))
        if VALUE_CODECS[self._settings.down_value_type] not in (request.value_codecs or PLAIN_VALUE_CODECS):
            raise Rejected(
                ErrorCode.UNKNOWN_CODEC,
                f"the run answers in {self._settings.down_value_type}, which this worker cannot read; upgrade it, "
                "or start the server with --down-value-type fp32",
            )
        awaited = model_install.model_awaited(shard)
        answer = join(shard, identity, self._layouts.read(identity, request.layout), request)
        close_rounds_after_leave(shard)  # a round may have waited for enough workers
        is_older = answer.state == pb.JOIN_STATE_READY and epoch(answer.generation) < epoch(request.generation_seen)
        if (is_older or answer.state == pb.JOIN_STATE_WAIT) and call.wait_seconds and not call.is_late:
            raise self._model_awaited(awaited)
        others = pb.JoinResponse(
            run_id=shard.run.run_id,
            settings=run_settings(self._settings),
            live_workers=len(shard.leases),
            run_state=RUN_STATES[shard.run.state],
            index_codecs=READABLE_INDEX_CODECS,
            value_codecs=READABLE_VALUE_CODECS,
            upload=None if answer.state == pb.JOIN_STATE_UPLOAD else model_install.upload_progress(shard),
            origins=shard.state.histories.origins,
            known_shards=shard.state.histories.known(),
            protocol_version=protocol,
        )
        answer.MergeFrom(others)
        return answer

    def renew_lease(self, call: Call, request: pb.RenewLeaseRequest) -> pb.RenewLeaseResponse:
        """Renew a lease."""
        shard = self._shard
        identity = self._identity(request.identity)
        member = shard.leases.require(identity)
        shard.uploads.note_progress(identity, request.uploaded)
        hear_of_shards(shard, request.shards)
        awaited, progress = model_install.model_awaited(shard), model_install.upload_progress(shard)
        if (progress is not None or shard.model is None) and call.wait_seconds and not call.is_late:
            raise self._model_awaited(awaited)
        return pb.RenewLeaseResponse(
            live_workers=len(shard.leases),
            received_bytes=member.received_bytes,
            installing=shard.installing,
            upload=progress,
            same_batches=shard.leases.same_batches(member, request.first_batches),
        )

    def leave(self, call: Call, request: pb.LeaveRequest) -> pb.LeaveResponse:
        """End a lease, of any run: the worker may have lost its first answer."""
        leave(self._shard, identity_from_message(request.identity))
        return pb.LeaveResponse()

    def upload_model(self, call: Call) -> Reading[pb.UploadModelRequest, pb.UploadModelResponse]:
        """Receive the model, or a part of it."""
        shard = self._shard
        reservation = self._stream(call)

        def open_upload(header: pb.UploadHeader) -> Upload:
            identity = identity_from_message(header.identity)
            reservation.belongs_to(identity.worker_id)
            upload = model_install.open_upload(shard, identity, header.generation, header.buffer_bytes)
            shard.run.require_upload(header.identity.run_id)
            call.on_received = partial(shard.leases.received, identity)
            return upload

        header, upload, is_whole = yield from read_upload(open_upload, lambda: call.values, reservation.clear)
        answer = upload.received()
        if is_whole:
            answer.version = model_install.finish_upload(
                shard, upload, header.version, run_id=header.identity.run_id, digest=header.digest
            )
        return answer

    def download_model(
        self, call: Call, request: pb.DownloadModelRequest
    ) -> Iterator[pb.DownloadModelResponse | bytes]:
        """Send the model."""
        shard = self._shard
        self._limits()
        with self._memory.answer() as reservation, ExitStack() as ending:
            reservation.add(0)
            copy = shard.copy_model()
            ending.callback(copy.close)
            model = copy.model
            specs = model.layout.buffers if copy.buffers else ()
            yield pb.DownloadModelResponse(
                header=pb.DownloadHeader(
                    layout=shard.packed(model.layout),
                    run_id=shard.run.run_id,
                    generation=model.generation,
                    version=copy.version,
                    shard_index=self._settings.shard_index,
                    num_shards=self._settings.num_shards,
                    start=model.span.start,
                    length=model.span.length,
                    buffer_bytes=packed_bytes(specs),
                    publication=model.publication_at(copy.version),
                )
            )
            checksum, size, end = frames.Checksum(), MessageSize(self._settings.chunk_bytes), model.span.start

            def messages_of(part: Span) -> Iterator[bytes]:
                for sent in model.as_sent(SparseSlice(part, None, copy.read_on(part).cpu())):
                    for chunk, first in frames.chunks_without_values(sent, frames.WireForm(), size.nbytes):
                        data = bytes_of(sent.values[first : first + chunk.count])
                        checksum.add(chunk, data)
                        yield chunk_message(chunk, data)
                        size.sent(data.nbytes)

            while end < model.span.end:
                part = Span(end, min(model.span.end, end + size.nbytes // 4))
                yield from [*messages_of(part)]  # a client that stops reading leaves messages here, and no values
                end = part.end
            for piece in frames.encode_bytes(pack(copy.buffers[s.name] for s in specs), self._settings.chunk_bytes):
                yield pb.DownloadModelResponse(buffers=piece)
            yield pb.DownloadModelResponse(commit=checksum.commit())

    def push_sparse(self, call: Call) -> Reading[pb.PushSparseRequest, LastStep]:
        """Receive a push; the last step applies it."""
        shard = self._shard
        call.raw = None if shard.durability.records.journal is None else []
        reservation = self._stream(call)
        receiving, member = NO_SPAN, None

        def accept(header: pb.PushHeader) -> tuple[Span, torch.dtype]:
            nonlocal receiving, member
            identity = self._identify(call, header.identity)
            reservation.belongs_to(identity.worker_id)
            call.on_received = partial(shard.leases.received, identity)
            if call.span is not NO_SPAN:
                receiving = tracing.begin("receive")
            member = check_push(shard, identity, header.step)
            if header.finished:
                finished_of(header)  # refused here, before the rest of it is received
            return shard.span, shard.value_dtype

        try:
            header, entries, arrivals = yield from read_push(
                accept, lambda: call.arrived_nanoseconds, lambda: call.values
            )
        finally:
            if receiving is not NO_SPAN:
                receiving.end()
        may_wait = lambda: bool(call.wait_seconds) and not call.is_late  # noqa: E731
        apply = prepare_push(shard, header, entries, call.raw or (), may_wait)

        def last_step() -> pb.PushSparseResponse:
            answer, repeated = shard.apply_thread.run(apply)
            self._finish(call)
            if repeated:
                self._metrics.repeated_pushes.inc()
            assert member is not None
            member.push_bytes += call.received_bytes
            self._metrics.push_size_bytes.observe(call.received_bytes)
            self._metrics.count("PushSparse", 1, call.received_bytes, dense_bytes=self._limits()[1])
            return pb.PushSparseResponse(
                version=answer.version,
                staleness=answer.staleness,
                repeated_push=repeated,
                group_arrival_nanoseconds=arrivals,
                apply_nanoseconds=answer.apply_nanoseconds,
                live_workers=len(shard.leases),
                run_state=RUN_STATES[shard.run.state],
            )

        return last_step

    def pull_diff(self, call: Call, request: pb.PullDiffRequest) -> Iterator[bytes]:
        """Send a worker what its replica lacks, once the push that it names is applied; called on the event loop."""
        identity = self._identify(call, request.identity)
        member = self._shard.leases.require(identity)
        if request.after_step:
            self._require_pushed(identity, request.after_step)
        return self._pull(call, member, request)

    def _pull(self, call: Call, member: Member, request: pb.PullDiffRequest) -> Iterator[bytes]:
        shard, identity = self._shard, member.identity
        _, dense = self._limits()
        with self._memory.answer() as reservation:
            reservation.belongs_to(identity.worker_id)
            asked = PullRequest(
                base_version=request.base_version if request.has_base else None,
                base_end=request.base_end,
                acknowledged=request.acknowledged_reply,
                replica_is_image=request.image,
                link_bytes_per_second=request.link_bytes_per_second,
                density=request.density,
                value=request.value_codec,
                pushes_all=request.pushes_all,
            )
            reply = pull(shard, member, request.generation, asked, reservation.add)
            reservation.share(reply.messages)
            self._finish(call)
            header = pb.PullHeader(
                mode=REPLY_MODES[reply.mode],
                version=reply.version,
                reply_number=reply.number,
                changed_density=reply.changed_density,
                image=reply.image,
                run_state=RUN_STATES[shard.run.state],
            )
            call.on_sent = partial(self._sent, "PullDiff", member)
            # Before the last message, so that a worker which has read that finds the count.
            self._metrics.count("PullDiff", 1, dense_bytes=dense)
            yield from self._pull_messages(header, reply)

    def exchange_buffers(self, call: Call) -> Reading[pb.ExchangeBuffersRequest, Iterator[pb.ExchangeBuffersResponse]]:
        """Average a worker's buffers."""
        shard = self._shard
        reservation = self._stream(call)
        header: pb.BuffersHeader = header_of((yield), "an exchange of buffers")
        identity = self._identity(header.identity)
        reservation.belongs_to(identity.worker_id)
        buffers = open_exchange(shard, identity, header.generation)
        reader = frames.BytesReader(header.buffer_bytes, packed_bytes(buffers.exchanged))
        while not reader.complete and (request := (yield)) is not None:
            reader.read(request.buffers)
        data = reader.finish()
        require_end((yield))
        average = exchange_buffers(shard, identity, header.generation, header.step, header.samples, data)
        self._metrics.count("ExchangeBuffers", received_bytes=call.received_bytes)
        call.on_sent = partial(self._sent, "ExchangeBuffers", None)
        pieces = frames.encode_bytes(average, self._settings.chunk_bytes)
        return (pb.ExchangeBuffersResponse(buffers=piece) for piece in pieces)

    def lease_samples(self, call: Call, request: pb.LeaseSamplesRequest) -> pb.LeaseSamplesResponse:
        """Lease samples to a worker."""
        shard = self._shard
        identity = self._identity(request.identity)
        live = shard.leases.identities()
        leased = lease_samples(shard, identity, sample_request_of(request))
        close_rounds_after_leave(shard)  # no round waits for a worker without samples
        if leased.held_by_others and request.samples and not leased.granted and call.wait_seconds and not call.is_late:
            known = shard.state.datasets.get(request.dataset)
            has_changed = known != leased.after

            def is_over() -> bool:
                moved = has_changed or shard.state.datasets.get(request.dataset) is not known
                return moved or shard.run.is_finished or shard.leases.identities() != live

            raise NotYetError(ErrorCode.BUSY, "other workers hold the samples that are left", is_over)
        return answer_to_message(leased, RUN_STATES[shard.run.state])

    def wait_for_all(self, call: Call, request: pb.WaitForAllRequest) -> pb.WaitForAllResponse:
        """Answer when all live workers are through, or the time is over."""
        shard, number = self._shard, request.number
        identity = self._identity(request.identity)
        waited_for = wait_for_all(shard, identity, number)
        if waited_for and call.wait_seconds and not call.is_late:
            raise NotYetError(ErrorCode.BUSY, "other workers train", partial(is_over, shard, identity, number))
        return pb.WaitForAllResponse(workers=waited_for[:_MOST_NAMES], run_state=RUN_STATES[shard.run.state])

    def publish(self, call: Call, request: pb.PublishRequest) -> pb.PublishResponse:
        """Publish a version of a feed that every shard has staged."""
        if not self._shard.is_coordinator:
            mine = place_of(self._settings.shard_index, self._settings.num_shards)
            raise Rejected(ErrorCode.SHARD_MISMATCH, f"shard 0 publishes; this is shard {mine}")
        identity = self._identity(request.identity)
        return pb.PublishResponse(version=publish(self._shard, identity, request.generation, request.version))

    # Inner parts

    def _identity(self, message: pb.WorkerIdentity) -> Identity:
        """Read the identity of a worker of this run."""
        self._shard.run.require_id(message.run_id)
        return identity_from_message(message)

    def _identify(self, call: Call, message: pb.WorkerIdentity) -> Identity:
        """Read whose request of a stream this is."""
        identity = call.identity = self._identity(message)
        call.has_lease = partial(self._shard.leases.is_live, identity)
        return identity

    def _model_awaited(self, seen: tuple[int, bool]) -> NotYetError:
        """Return the refusal of a call that waits for a model, until what was seen of it is another."""
        shard = self._shard
        return NotYetError(ErrorCode.BUSY, "a model is awaited", lambda: model_install.model_awaited(shard) != seen)

    def _require_pushed(self, identity: Identity, step: int) -> None:
        """Wait for the push of a step; it may be on its way for as long as a stream may be idle."""
        pushes, idle_seconds = self._shard.state.pushes, self._settings.stream_idle_seconds
        if pushes.find(identity).step < step:
            why = f"the push of step {step}, which the pull comes behind, has not been applied"
            raise NotYetError(
                ErrorCode.BUSY,
                why,
                lambda: pushes.find(identity).step >= step,
                pusher=lambda: identity,
                least_seconds=idle_seconds,
            )

    def _finish(self, call: Call) -> None:
        """Have an answer wait until everything until now is durable, on a thread that may wait."""
        if self._shard.durability.records.must_wait:
            call.finish = self._shard.durability.records.wait

    def _stream(self, call: Call) -> Reservation:
        """Open the reservation of a stream that a worker sends; it ends with the request."""
        most_of_stream, _ = self._limits()
        call.reservation = self._memory.receive(most_of_stream).__enter__()
        return call.reservation

    def _limits(self) -> tuple[int, int]:
        """Return the bytes that a stream may occupy, and those of all elements; the account's limit follows too."""
        layout = self._shard.state.layout
        if self._limited is None or self._limited[0] is not layout:
            dense, elements = 0, 0
            if layout is not None:
                span = self._shard.span
                dense, elements = dense_bytes(layout, span), span.length
            self._limited = layout, (largest_stream(layout, elements), dense)
            self._memory.most = self._settings.memory_bytes or default_limit(elements)
        return self._limited[1]

    def _most(self) -> int:
        self._limits()
        return self._memory.most

    def _most_in_flight(self) -> int:
        self._limits()
        return self._memory.room()

    def _sent(self, rpc: str, member: Member | None, nbytes: int) -> None:
        self._metrics.count(rpc, sent_bytes=nbytes)
        if member is not None:
            member.pull_bytes += nbytes

    @traced("encode")
    def _pull_messages(self, header: pb.PullHeader, reply: Reply) -> Iterator[bytes]:
        messages = iter(reply.messages)
        first, beginning = next(messages), field_bytes(pb.PullDiffResponse.HEADER_FIELD_NUMBER, header)
        if len(first) <= _TOGETHER_BYTES:
            yield beginning + first
        else:
            yield beginning
            yield first
        yield from messages


def read_upload(
    open_upload: Callable[[pb.UploadHeader], Upload],
    values: Callable[[], Sequence[memoryview]] = tuple,
    written: Callable[[], None] = lambda: None,
) -> Reading[pb.UploadModelRequest, tuple[pb.UploadHeader, Upload, bool]]:
    """Read one call of an upload; tell whether that was its last one, with a commit that agrees.

    ``open_upload`` checks the header and returns the upload that the call continues; ``values`` returns the value bytes
    that are not in the message itself; ``written`` is called when the upload has what a message brought. Raises
    :class:`Rejected` if the stream breaks the form, or the commit does not agree.
    """
    header = header_of((yield), "an upload")
    upload = open_upload(header)
    call = upload.go_on()
    written()
    while (request := (yield)) is not None:
        kind = request.WhichOneof("message")
        if kind == "chunk":
            upload.read(call, request.chunk, *values())
        elif kind == "buffers":
            upload.read_buffers(call, request.buffers)
        elif kind == "commit":
            require_end((yield))
            upload.verify(call, request.commit)
            return header, upload, True
        else:
            raise Rejected(ErrorCode.BAD_REQUEST, f"unexpected {kind or 'empty message'} inside an upload")
        written()
    return header, upload, False


def dense_bytes(layout: ModelLayout, span: Span) -> int:
    """Return the bytes of all elements of a span, each in the data type of its parameter."""
    return sum(dtype.itemsize * run.length for dtype, run in layout.dtype_runs(span))

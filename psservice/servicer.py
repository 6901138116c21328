"""The RPC layer: translates messages to calls of the engine and back, and does nothing else.

The calls of workers; those of operators are in :mod:`psservice.operatorservicer`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc

from pscore import frames
from pscore.buffers import pack, packed_bytes
from pscore.codecs.names import (
    PLAIN_INDEX_CODECS,
    PLAIN_VALUE_CODECS,
    READABLE_INDEX_CODECS,
    READABLE_VALUE_CODECS,
    VALUE_CODECS,
)
from pscore.frames import WireForm
from pscore.layout import ModelLayout, Span
from pscore.messages import PROTOCOL_VERSION, layout_from_message, layout_to_message, place_of
from pscore.reasons import Reason, Refusal
from pscore.segment import Segment
from pscore.tracing import traced_stream
from pscore.v1 import parameter_server_pb2 as pb
from pscore.v1.parameter_server_pb2_grpc import ParameterServerServiceServicer
from pscore.version import __version__
from psservice.calls import Push
from psservice.datamessages import answer_to_message, finished_of, wish_of
from psservice.engine import Engine
from psservice.identities import require_name
from psservice.inflight import Charge, InFlight, charged, largest_stream
from psservice.operatorservicer import OperatorServicer, Process
from psservice.security import Gate
from psservice.shard.replies import Reply
from psservice.statusreport import REPLY_MODES, RUN_STATES, run_settings
from psservice.streams import PushReader, read_push, read_upload, require_end
from psservice.traffic import dense_bytes

WAIT_RETRY_SECONDS = 0.2

_JOIN_STATES = {"ready": pb.JOIN_STATE_READY, "upload": pb.JOIN_STATE_UPLOAD, "wait": pb.JOIN_STATE_WAIT}


@dataclass(frozen=True, slots=True)
class _Sized:
    """What follows from a layout: bytes that a valid stream may occupy, and those of every element."""

    layout: ModelLayout | None
    largest_stream: int
    dense_bytes: int


class ParameterServerServicer(OperatorServicer, ParameterServerServiceServicer):
    """``sparseps.v1.ParameterServerService`` over one engine; the calls of workers stand here.

    Args:
        engine: the shard.
        gate: who is let in.
        process: told when an operator drains the shard.
    """

    def __init__(self, engine: Engine, gate: Gate, process: Process | None = None) -> None:
        """Serve this engine to whom the gate admits."""
        super().__init__(engine, gate, process)
        self._inflight = InFlight(engine.settings.inflight_bytes)
        self._sized = _Sized(None, largest_stream(None, 0), 0)
        self._metrics.bytes_in_flight.set_function(lambda: self._inflight.bytes)

    def Join(self, request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.JoinResponse:  # noqa: N802
        """Grant a lease."""
        engine = self._engine
        with self._admitted(context, "Join", changes=True) as caller:
            if request.protocol_version != PROTOCOL_VERSION:
                raise Refusal(
                    Reason.UNKNOWN_PROTOCOL,
                    f"the worker speaks protocol {request.protocol_version}, the server {PROTOCOL_VERSION}",
                )
            engine.run.require_id(request.identity.run_id, may_be_empty=True)
            identity = self._identity(caller, request.identity, any_run=True)
            self._require_place(place_of(request.shard_index, request.num_shards))
            down = VALUE_CODECS[self._settings.down_value_type]
            if down not in (request.value_codecs or PLAIN_VALUE_CODECS):
                raise Refusal(
                    Reason.UNKNOWN_CODEC,
                    f"the run answers in {self._settings.down_value_type}, which this worker cannot read; upgrade it, "
                    "or start the server with --down-value-type fp32",
                )
            outcome = engine.join(
                identity,
                layout_from_message(request.layout),
                request.method,
                dict(request.method_settings),
                generation_seen=request.generation_seen,
                has_replica=request.has_replica,
                index_codecs=frozenset(request.index_codecs or PLAIN_INDEX_CODECS),
            )
            incarnation, step = outcome.last_push or ("", 0)
            return pb.JoinResponse(
                state=_JOIN_STATES[outcome.state],
                run_id=engine.run.run_id,
                settings=run_settings(self._settings),
                generation=outcome.generation,
                version=outcome.version,
                retry_seconds=WAIT_RETRY_SECONDS,
                live_workers=len(engine.membership),
                last_step=step,
                last_incarnation=incarnation,
                run_state=RUN_STATES[engine.run.state],
                server_version=__version__,
                index_codecs=READABLE_INDEX_CODECS,
                value_codecs=READABLE_VALUE_CODECS,
                first_step=outcome.first_step,
            )

    def RenewLease(self, request: pb.RenewLeaseRequest, context: grpc.ServicerContext) -> pb.RenewLeaseResponse:  # noqa: N802
        """Renew a lease."""
        with self._admitted(context, "RenewLease") as caller:
            engine = self._engine
            engine.membership.require(self._identity(caller, request.identity))
            require_name("checkpoint", request.checkpoint or "-")
            engine.persistence.follow(engine, request.checkpoint)
            return pb.RenewLeaseResponse(
                checkpoint=engine.persistence.told(engine),
                live_workers=len(engine.membership),
                run_state=RUN_STATES[engine.run.state],
                version=engine.model.version if engine.model else 0,
            )

    def Leave(self, request: pb.LeaveRequest, context: grpc.ServicerContext) -> pb.LeaveResponse:  # noqa: N802
        """End a lease."""
        with self._admitted(context, "Leave") as caller:
            self._engine.leave(self._identity(caller, request.identity))
            return pb.LeaveResponse()

    def UploadModel(  # noqa: N802
        self, request_iterator: Iterator[pb.UploadModelRequest], context: grpc.ServicerContext
    ) -> pb.UploadModelResponse:
        """Take the model in."""
        engine = self._engine

        with self._admitted(context, "UploadModel", changes=True) as caller, self._stream() as charge:

            def open_upload(header: pb.UploadHeader) -> tuple[Span, int]:
                identity = self._identity(caller, header.identity, any_run=True)
                charge.belongs_to(identity.worker_id)
                engine.check_upload(identity, header.generation)
                engine.run.follow(header.identity.run_id)
                return engine.span, engine.upload_buffer_bytes()

            header, segments, buffers = read_upload(charged(request_iterator, charge), open_upload)
            version = engine.finish_upload(
                self._identity(caller, header.identity), header.generation, header.version, segments, buffers
            )
            return pb.UploadModelResponse(version=version)

    def DownloadModel(  # noqa: N802
        self, request: pb.DownloadModelRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.DownloadModelResponse]:
        """Send the model out."""
        engine = self._engine
        with self._admitted(context, "DownloadModel"), self._inflight.open() as charge:
            charge.add(4 * engine.require_model(None).span.length)  # the copy, fp32
            copy = engine.copy_model()
            model = copy.model
            specs = model.layout.buffers if copy.buffers else ()
            yield pb.DownloadModelResponse(
                header=pb.DownloadHeader(
                    layout=layout_to_message(model.layout),
                    run_id=engine.run.run_id,
                    generation=model.generation,
                    version=copy.version,
                    shard_index=self._settings.shard_index,
                    num_shards=self._settings.num_shards,
                    start=model.span.start,
                    length=model.span.length,
                    buffer_bytes=packed_bytes(specs),
                )
            )
            checksum = frames.Checksum()
            for chunk in self._chunks(model.as_sent(None, copy.values), WireForm(), checksum):
                yield pb.DownloadModelResponse(chunk=chunk)
            for piece in frames.encode_bytes(pack(copy.buffers[s.name] for s in specs), self._settings.chunk_bytes):
                yield pb.DownloadModelResponse(buffers=piece)
            yield pb.DownloadModelResponse(commit=checksum.commit())

    def PushSparse(  # noqa: N802
        self, request_iterator: Iterator[pb.PushSparseRequest], context: grpc.ServicerContext
    ) -> pb.PushSparseResponse:
        """Take a push in and apply it."""
        engine = self._engine

        with self._admitted(context, "PushSparse", changes=True) as caller, self._stream() as charge:

            def open_push(header: pb.PushHeader) -> PushReader:
                identity = self._identity(caller, header.identity)
                charge.belongs_to(identity.worker_id)
                engine.check_push(identity, header.step)
                if header.step == 0:
                    raise Refusal(Reason.BAD_REQUEST, "steps count from 1")
                if not 0 <= header.learning_rate < math.inf:
                    raise Refusal(Reason.BAD_REQUEST, f"{header.learning_rate} is no learning rate")
                finished_of(header)  # refused here, before the rest of it is received
                return PushReader.of(header, engine.span, keep=engine.persistence.keeps_journal)

            header, reader, segments = read_push(charged(request_iterator, charge), open_push)
            identity = self._identity(caller, header.identity)
            answer, repeated = engine.commit(
                Push(
                    identity,
                    header.step,
                    header.generation,
                    header.base_version,
                    header.samples,
                    segments,
                    reader.messages,
                    header.learning_rate,
                    finished_of(header),
                )
            )
            if repeated:
                self._metrics.repeated_pushes.inc()
            self._count("PushSparse", engine.membership.require(identity), received=reader.bytes)
            self._answered("PushSparse")
            return pb.PushSparseResponse(
                version=answer.version,
                staleness=answer.staleness,
                repeated_push=repeated,
                group_arrival_nanoseconds=reader.arrivals,
                apply_nanoseconds=answer.apply_nanoseconds,
                applied_scale=answer.applied_scale,
                live_workers=len(engine.membership),
                run_state=RUN_STATES[engine.run.state],
            )

    def PullDiff(  # noqa: N802
        self, request: pb.PullDiffRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.PullDiffResponse]:
        """Send a worker what its replica lacks."""
        engine = self._engine
        with self._admitted(context, "PullDiff") as caller, self._reply() as charge:
            identity = self._identity(caller, request.identity)
            charge.belongs_to(identity.worker_id)
            reply = engine.pull(
                identity,
                request.generation,
                base_version=request.base_version if request.has_base else None,
                acknowledged=request.acknowledged_reply,
                replica_is_image=request.image,
                link_bytes_per_second=request.link_bytes_per_second,
                reserve=charge.add,
            )
            header = pb.PullHeader(
                mode=REPLY_MODES[reply.mode],
                version=reply.version,
                reply_number=reply.number,
                density=reply.density,
                changed_density=reply.changed_density,
                image=reply.image,
                run_state=RUN_STATES[engine.run.state],
            )
            member = engine.membership.require(identity)
            self._answered("PullDiff")  # before the last message: who has read that finds all of it counted
            for message in self._pull_messages(header, reply):
                self._count("PullDiff", member, sent=frames.wire_bytes(message))
                yield message

    def ExchangeBuffers(  # noqa: N802
        self, request_iterator: Iterator[pb.ExchangeBuffersRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ExchangeBuffersResponse]:
        """Average a worker's buffers."""
        engine = self._engine
        with self._admitted(context, "ExchangeBuffers", changes=True) as caller, self._stream() as charge:
            requests = charged(request_iterator, charge)
            first = next(requests, None)
            if first is None or first.WhichOneof("message") != "header":
                raise Refusal(Reason.BAD_REQUEST, "an exchange of buffers begins with its header")
            header = first.header
            identity = self._identity(caller, header.identity)
            charge.belongs_to(identity.worker_id)
            buffers = engine.require_buffers(identity, header.generation)
            reader = frames.BytesReader(header.buffer_bytes, packed_bytes(buffers.exchanged))
            received = frames.wire_bytes(first)
            while not reader.complete:
                request = next(requests, None)
                if request is None:
                    break
                received += frames.wire_bytes(request)
                reader.read(request.buffers)
            data = reader.finish()
            require_end(requests)
            average = engine.exchange_buffers(identity, header.generation, header.step, header.samples, data)
            self._count("ExchangeBuffers", None, received=received)
            for piece in frames.encode_bytes(average, self._settings.chunk_bytes):
                message = pb.ExchangeBuffersResponse(buffers=piece)
                self._count("ExchangeBuffers", None, sent=frames.wire_bytes(message))
                yield message

    def LeaseSamples(  # noqa: N802
        self, request: pb.LeaseSamplesRequest, context: grpc.ServicerContext
    ) -> pb.LeaseSamplesResponse:
        """Hand samples out."""
        engine = self._engine
        with self._admitted(context, "LeaseSamples", changes=True) as caller:
            leased = engine.lease_samples(self._identity(caller, request.identity), wish_of(request))
            answer = answer_to_message(leased, len(engine.membership))
            answer.run_state = RUN_STATES[engine.run.state]
            return answer

    def _stream(self) -> Charge:
        """Open the charge of a stream that a worker sends."""
        return self._inflight.open(self._largest_stream, self._settings.worker_bytes or 2 * self._largest_stream)

    def _reply(self) -> Charge:
        """Open the charge of an answer, which is as large as it is."""
        return self._inflight.open(most_of_worker=self._settings.worker_bytes or 2 * self._largest_stream)

    def _answered(self, rpc: str) -> None:
        nbytes = self._sizes.dense_bytes
        self._engine.traffic.answered(rpc, nbytes)
        self._metrics.dense_bytes.labels(rpc=rpc).inc(nbytes)

    @property
    def _largest_stream(self) -> int:
        return self._settings.stream_bytes or self._sizes.largest_stream

    @property
    def _sizes(self) -> "_Sized":
        layout = self._engine.layout
        if self._sized.layout is not layout and layout is not None:
            span = self._engine.span
            self._sized = _Sized(layout, largest_stream(layout, span.length), dense_bytes(layout, span))
        return self._sized

    def _chunks(self, segments: Sequence[Segment], form: WireForm, checksum: frames.Checksum) -> Iterator[pb.Chunk]:
        for segment in segments:
            for chunk, _ in frames.encode(segment, form, chunk_bytes=self._settings.chunk_bytes):
                checksum.add(chunk)
                yield chunk

    @traced_stream("encode")
    def _pull_messages(self, header: pb.PullHeader, reply: Reply) -> Iterator[pb.PullDiffResponse]:
        checksum = frames.Checksum()
        yield pb.PullDiffResponse(header=header)
        if reply.chunks is None:
            for chunk in self._chunks(reply.segments, reply.form, checksum):
                yield pb.PullDiffResponse(chunk=chunk)
        else:
            for chunk in reply.chunks:
                checksum.add(chunk)
                yield pb.PullDiffResponse(chunk=chunk)
        yield pb.PullDiffResponse(commit=checksum.commit())

"""The calls of workers: messages to calls of the engine and back, and nothing else.

A handler runs in a thread of its lane. One that reads a stream is a generator (:mod:`psservice.rpc.push_stream`);
what it does before its first message runs on the event loop and must not wait.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from pscore.model.buffers import pack, packed_bytes
from pscore.model.layout import ModelLayout
from pscore.model.segment import Segment
from pscore.telemetry import tracing
from pscore.telemetry.tracing import traced_stream
from pscore.version import __version__
from pscore.wire import frames
from pscore.wire.codecs.names import (
    PLAIN_INDEX_CODECS,
    PLAIN_VALUE_CODECS,
    READABLE_INDEX_CODECS,
    READABLE_VALUE_CODECS,
    VALUE_CODECS,
)
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.frames import WireForm
from pscore.wire.messages import PROTOCOL_VERSION, layout_to_message, place_of
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.cluster.member import Member
from psservice.model.reply_session import PullRequest, Reply
from psservice.observability.traffic import dense_bytes
from psservice.rpc import bounds
from psservice.rpc.auth import require_worker
from psservice.rpc.calls import Call, Handler
from psservice.rpc.identity import identity_from_message, require_name
from psservice.rpc.memory_budget import MemoryBudget, Reservation, charged, largest_stream
from psservice.rpc.push_stream import PushReader, Reading, read_push, read_upload, require_end
from psservice.rpc.status import REPLY_MODES, RUN_STATES, run_settings
from psservice.sampling.codec import answer_to_message, finished_of, wish_of
from psservice.settings import ServerSettings
from psservice.shard import model_install
from psservice.shard.buffers_and_samples import exchange_buffers, lease_samples, open_exchange
from psservice.shard.join import JoinLayouts, join, leave
from psservice.shard.pull import pull
from psservice.shard.push import check_push, commit
from psservice.shard.shard import Shard
from psservice.shard.types import Push
from psservice.shard.upload import Upload
from psservice.types import Identity

WAIT_RETRY_SECONDS = 0.2

_CHECKED_BYTES = 1 << 20  # of a reply after which its reader is told that they are whole

_JOIN_STATES = {"ready": pb.JOIN_STATE_READY, "upload": pb.JOIN_STATE_UPLOAD, "wait": pb.JOIN_STATE_WAIT}


@dataclass(frozen=True, slots=True)
class _Sized:
    """What follows from a layout: bytes that a valid stream may occupy, and those of every element."""

    layout: ModelLayout | None
    largest_stream: int
    dense_bytes: int


def require_place(settings: ServerSettings, meant: str) -> None:
    """Refuse a call that is meant for another shard: its address may have been another's a moment ago."""
    mine = place_of(settings.shard_index, settings.num_shards)
    if meant != mine:
        raise Rejected(
            ErrorCode.SHARD_MISMATCH, f"the worker takes this server for shard {meant[:32]}; it is shard {mine}"
        )


class WorkerCalls:
    """The calls of workers over one engine.

    Args:
        engine: the shard.
    """

    def __init__(self, engine: Shard) -> None:
        """Begin with nothing in flight."""
        self._engine, self._settings, self._metrics = engine, engine.settings, engine.metrics
        self._layouts = JoinLayouts(engine)
        self._inflight = MemoryBudget(self._settings.inflight_bytes)
        self._downloads = MemoryBudget(self._settings.inflight_bytes)
        self._sized = _Sized(None, largest_stream(None, 0), 0)
        self._metrics.bytes_in_flight.set_function(
            lambda: self._inflight.bytes + self._downloads.bytes + engine.uploads.nbytes
        )

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers by the method's name."""
        return {
            "Join": self.join,
            "RenewLease": self.renew_lease,
            "Leave": self.leave,
            "UploadModel": self.upload_model,
            "DownloadModel": self.download_model,
            "PushSparse": self.push_sparse,
            "PullDiff": self.pull_diff,
            "ExchangeBuffers": self.exchange_buffers,
            "LeaseSamples": self.lease_samples,
        }

    def join(self, call: Call, request: pb.JoinRequest) -> pb.JoinResponse:
        """Grant a lease."""
        engine = self._engine
        if request.protocol_version != PROTOCOL_VERSION:
            raise Rejected(
                ErrorCode.UNKNOWN_PROTOCOL,
                f"the worker speaks protocol {request.protocol_version}, the server {PROTOCOL_VERSION}",
            )
        bounds.require_join(request)
        identity = self._identity(call, request.identity, any_run=True)
        engine.run.require_id(request.identity.run_id, may_be_empty=True)
        require_place(self._settings, place_of(request.shard_index, request.num_shards))
        down = VALUE_CODECS[self._settings.down_value_type]
        if down not in (request.value_codecs or PLAIN_VALUE_CODECS):
            raise Rejected(
                ErrorCode.UNKNOWN_CODEC,
                f"the run answers in {self._settings.down_value_type}, which this worker cannot read; upgrade it, "
                "or start the server with --down-value-type fp32",
            )
        outcome = join(
            engine,
            identity,
            self._layouts.read(identity, request.layout),
            request.method,
            dict(request.method_settings),
            generation_seen=request.generation_seen,
            has_replica=request.has_replica,
            index_codecs=frozenset(request.index_codecs or PLAIN_INDEX_CODECS),
            loaded=request.loaded if request.HasField("loaded") else None,
        )
        incarnation, step = outcome.last_push or ("", 0)
        return pb.JoinResponse(
            state=_JOIN_STATES[outcome.state],
            run_id=engine.run.run_id,
            settings=run_settings(self._settings),
            generation=outcome.generation,
            version=outcome.version,
            retry_seconds=WAIT_RETRY_SECONDS,
            live_workers=len(engine.leases),
            last_step=step,
            last_incarnation=incarnation,
            run_state=RUN_STATES[engine.run.state],
            server_version=__version__,
            index_codecs=READABLE_INDEX_CODECS,
            value_codecs=READABLE_VALUE_CODECS,
            first_step=outcome.first_step,
            upload=None if outcome.state == "upload" else model_install.upload_progress(engine),
            load_refused=outcome.load_refused,
        )

    def renew_lease(self, call: Call, request: pb.RenewLeaseRequest) -> pb.RenewLeaseResponse:
        """Renew a lease."""
        engine = self._engine
        bounds.require(request)
        identity = self._identity(call, request.identity)
        member = engine.leases.require(identity)
        engine.uploads.grant.note(identity, request.uploaded)
        require_name("checkpoint", request.checkpoint or "-")
        engine.durability.follow(engine, request.checkpoint)
        return pb.RenewLeaseResponse(
            checkpoint=engine.durability.told(engine),
            live_workers=len(engine.leases),
            run_state=RUN_STATES[engine.run.state],
            version=engine.model.version if engine.model else 0,
            received_bytes=member.received_bytes,
            installing=engine.installing,
            upload=model_install.upload_progress(engine),
            same_batches=engine.leases.same_batches(member, request.first_batches),
        )

    def leave(self, call: Call, request: pb.LeaveRequest) -> pb.LeaveResponse:
        """End a lease."""
        leave(self._engine, self._identity(call, request.identity, any_run=True))  # its first answer may be lost
        return pb.LeaveResponse()

    def upload_model(self, call: Call) -> Reading[pb.UploadModelRequest, pb.UploadModelResponse]:
        """Take the model in, or a part of it."""
        engine = self._engine
        with self._stream(call) as charge:

            def open_upload(header: pb.UploadHeader) -> Upload:
                bounds.require(header)
                bounds.require_digest(header.digest, may_be_empty=True)
                identity = self._identity(call, header.identity, any_run=True)
                charge.belongs_to(identity.worker_id)
                upload = model_install.open_upload(engine, identity, header.generation, header.buffer_bytes)
                engine.run.require_upload(header.identity.run_id)
                call.on_received = partial(engine.leases.received, identity)
                return upload

            header, upload, is_whole = yield from charged(read_upload(open_upload), charge, is_kept=False)
            answer = upload.received()
            if is_whole:
                answer.version = model_install.finish_upload(
                    engine, upload, header.version, run_id=header.identity.run_id, digest=header.digest
                )
            return answer

    def download_model(self, call: Call, request: pb.DownloadModelRequest) -> Iterator[pb.DownloadModelResponse]:
        """Send the model out. What readers of models hold is limited apart from what training needs."""
        engine = self._engine
        with self._downloads.open() as charge:
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
            for chunk in self._chunks(model.as_sent(Segment(model.span, None, copy.values)), WireForm(), checksum):
                yield pb.DownloadModelResponse(chunk=chunk)
            for piece in frames.encode_bytes(pack(copy.buffers[s.name] for s in specs), self._settings.chunk_bytes):
                yield pb.DownloadModelResponse(buffers=piece)
            yield pb.DownloadModelResponse(commit=checksum.commit())

    def push_sparse(self, call: Call) -> Reading[pb.PushSparseRequest, pb.PushSparseResponse]:
        """Take a push in and apply it."""
        engine = self._engine
        call.keeps_raw = engine.durability.events.keeps_journal
        with self._stream(call) as charge:

            def open_push(header: pb.PushHeader) -> PushReader:
                bounds.require(header)
                identity = self._identity(call, header.identity)
                charge.belongs_to(identity.worker_id)
                call.on_received = partial(engine.leases.received, identity)
                check_push(engine, identity, header.step)
                finished_of(header)  # refused here, before the rest of it is received
                return PushReader.of(header, engine.span, lambda: call.arrived_nanoseconds)

            receiving = tracing.begin("receive")
            try:
                header, reader, segments = yield from charged(read_push(open_push), charge)
            finally:
                receiving.end()
            identity = self._identity(call, header.identity)
            answer, repeated = commit(engine, Push(header, segments, call.raw))
            if repeated:
                self._metrics.repeated_pushes.inc()
            self._count("PushSparse", engine.leases.require(identity), received=call.received_bytes)
            self._answered("PushSparse")
            return pb.PushSparseResponse(
                version=answer.version,
                staleness=answer.staleness,
                repeated_push=repeated,
                group_arrival_nanoseconds=reader.arrivals,
                apply_nanoseconds=answer.apply_nanoseconds,
                applied_scale=answer.applied_scale,
                live_workers=len(engine.leases),
                run_state=RUN_STATES[engine.run.state],
            )

    def pull_diff(self, call: Call, request: pb.PullDiffRequest) -> Iterator[pb.PullDiffResponse]:
        """Send a worker what its replica lacks."""
        engine = self._engine
        bounds.require(request)
        with self._reply() as charge:
            identity = self._identity(call, request.identity)
            charge.belongs_to(identity.worker_id)
            asked = PullRequest(
                base_version=request.base_version if request.has_base else None,
                base_end=request.base_end,
                acknowledged=request.acknowledged_reply,
                replica_is_image=request.image,
                link_bytes_per_second=request.link_bytes_per_second,
            )
            reply = pull(engine, identity, request.generation, asked, charge.add)
            header = pb.PullHeader(
                mode=REPLY_MODES[reply.mode],
                version=reply.version,
                reply_number=reply.number,
                density=reply.density,
                changed_density=reply.changed_density,
                image=reply.image,
                run_state=RUN_STATES[engine.run.state],
            )
            member = engine.leases.require(identity)
            self._answered("PullDiff")  # before the last message: who has read that finds all of it counted
            call.on_sent = lambda nbytes: self._count("PullDiff", member, sent=nbytes)
            yield from self._pull_messages(header, reply)

    def exchange_buffers(self, call: Call) -> Reading[pb.ExchangeBuffersRequest, Iterator[pb.ExchangeBuffersResponse]]:
        """Average a worker's buffers."""
        with self._stream(call) as charge:
            average = yield from charged(self._read_buffers(call, charge), charge)
        self._count("ExchangeBuffers", None, received=call.received_bytes)
        call.on_sent = lambda nbytes: self._count("ExchangeBuffers", None, sent=nbytes)
        pieces = frames.encode_bytes(average, self._settings.chunk_bytes)
        return (pb.ExchangeBuffersResponse(buffers=piece) for piece in pieces)

    def lease_samples(self, call: Call, request: pb.LeaseSamplesRequest) -> pb.LeaseSamplesResponse:
        """Hand samples out."""
        engine = self._engine
        leased = lease_samples(engine, self._identity(call, request.identity), wish_of(request))
        answer = answer_to_message(leased, len(engine.leases))
        answer.run_state = RUN_STATES[engine.run.state]
        return answer

    # Inner parts

    def _identity(self, call: Call, message: pb.WorkerIdentity, *, any_run: bool = False) -> Identity:
        for what, text in (
            ("worker_id", message.worker_id),
            ("incarnation", message.incarnation),
            ("run_id", message.run_id or "-"),
        ):
            require_name(what, text)
        require_worker(call.caller, message.worker_id)
        if not any_run:
            self._engine.run.require_id(message.run_id)
        return identity_from_message(message)

    def _read_buffers(self, call: Call, charge: Reservation) -> Reading[pb.ExchangeBuffersRequest, bytes]:
        """Read a contribution; return the packed average."""
        engine = self._engine
        first = yield
        if first is None or first.WhichOneof("message") != "header":
            raise Rejected(ErrorCode.BAD_REQUEST, "an exchange of buffers begins with its header")
        header = first.header
        bounds.require(header)
        identity = self._identity(call, header.identity)
        charge.belongs_to(identity.worker_id)
        buffers = open_exchange(engine, identity, header.generation)
        reader = frames.BytesReader(header.buffer_bytes, packed_bytes(buffers.exchanged))
        while not reader.complete and (request := (yield)) is not None:
            reader.read(request.buffers)
        data = reader.finish()
        require_end((yield))
        return exchange_buffers(engine, identity, header.generation, header.step, header.samples, data)

    def _stream(self, call: Call) -> Reservation:
        """Open the charge of a stream that a worker sends."""
        call.charge = self._inflight.open(self._largest_stream, self._settings.worker_bytes or 2 * self._largest_stream)
        return call.charge

    def _reply(self) -> Reservation:
        """Open the charge of an answer, which is as large as it is."""
        return self._inflight.open(most_of_worker=self._settings.worker_bytes or 2 * self._largest_stream)

    def _count(self, rpc: str, member: Member | None, *, received: int = 0, sent: int = 0) -> None:
        self._engine.traffic.count(rpc, received + sent)
        self._metrics.received_bytes.labels(rpc=rpc).inc(received)
        self._metrics.sent_bytes.labels(rpc=rpc).inc(sent)
        if member is not None:
            member.push_bytes += received
            member.pull_bytes += sent

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
        checksum, unchecked = frames.Checksum(), 0
        yield pb.PullDiffResponse(header=header)
        if reply.chunks is None:
            for chunk in self._chunks(reply.segments, reply.form, checksum):
                yield pb.PullDiffResponse(chunk=chunk)
                unchecked += len(chunk.values) + len(chunk.indices)
                if unchecked >= _CHECKED_BYTES:
                    unchecked = 0
                    yield pb.PullDiffResponse(so_far=checksum.commit())
        else:
            for chunk in reply.chunks:
                checksum.add(chunk)
                yield pb.PullDiffResponse(chunk=chunk)
        yield pb.PullDiffResponse(commit=checksum.commit())

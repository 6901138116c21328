"""A worker without a model: the raw stubs, pushes of noise, replies thrown away. Many of them fit into one process."""

import uuid
from collections.abc import Iterator, Mapping
from types import TracebackType

import grpc
import torch

from benchmarks.workload.replay_worker import CALL_SECONDS
from benchmarks.workload.streams import push_requests
from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.net.proxies import NO_PROXY
from pscore.wire import frames
from pscore.wire.codecs.names import READABLE_INDEX_CODECS, READABLE_VALUE_CODECS
from pscore.wire.layouts import pack_layout
from pscore.wire.protocol import NEWEST_PROTOCOL
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub


def join_request(
    layout: ModelLayout, shard: int = 0, shards: int = 1, method_settings: Mapping[str, str] | None = None
) -> pb.JoinRequest:
    """Return a request to join; who joins is filled in later."""
    return pb.JoinRequest(
        identity=pb.WorkerIdentity(),
        protocol_version=NEWEST_PROTOCOL,
        method="bench",
        method_settings=method_settings,
        layout=pack_layout(layout),
        shard_index=shard,
        num_shards=shards,
        index_codecs=READABLE_INDEX_CODECS,
        value_codecs=READABLE_VALUE_CODECS,
    )


def push_messages(layout: ModelLayout, update: SparseSlice, chunk_bytes: int) -> list[bytes]:
    """Encode a push once for all, as one group: the header, to be filled in for each push, and what follows it."""
    messages = push_requests(pb.WorkerIdentity(), update, [Span(0, layout.size)], chunk_bytes=chunk_bytes)
    return [message.SerializeToString() for message in messages]


class RawWorker:
    """Joins (and uploads zeros if it is the first), pushes, pulls; each push and each pull is a call.

    Args:
        address: of a server with one shard.
        layout: the model.
        name: this worker's.
        method_settings: those of the run.
    """

    def __init__(
        self, address: str, layout: ModelLayout, name: str, method_settings: Mapping[str, str] | None = None
    ) -> None:
        """Join."""
        self._channel = grpc.insecure_channel(address, NO_PROXY)
        self._stub = ParameterServerServiceStub(self._channel)
        self._layout = layout
        self._step = 0
        self._base: int | None = None
        self._acknowledged = 0
        self._image = False
        request = join_request(layout, method_settings=method_settings)
        self._identity = request.identity
        self._identity.worker_id, self._identity.incarnation = name, str(uuid.uuid4())
        joined: pb.JoinResponse = self._stub.Join(request, timeout=CALL_SECONDS)
        self._identity.run_id = joined.run_id
        self._generation = joined.generation
        self._chunk_bytes = joined.settings.chunk_bytes
        if joined.state == pb.JOIN_STATE_UPLOAD:
            self._stub.UploadModel(
                zeros(self._identity, self._generation, Span(0, layout.size), self._chunk_bytes), timeout=CALL_SECONDS
            )

    def push(self, update: SparseSlice) -> None:
        """Push; returns when the server has applied it."""
        self._step += 1
        requests = push_requests(
            self._identity,
            update,
            [Span(0, self._layout.size)],
            step=self._step,
            generation=self._generation,
            base_version=self._base or 0,
            chunk_bytes=self._chunk_bytes,
        )
        answer = self._stub.PushSparse(requests, timeout=CALL_SECONDS)
        list(answer)

    def pull(self) -> int:
        """Pull, note the reply as applied, and return its bytes."""
        request = pb.PullDiffRequest(
            identity=self._identity,
            generation=self._generation,
            has_base=self._base is not None,
            base_version=self._base or 0,
            acknowledged_reply=self._acknowledged,
            image=self._image,
        )
        received = 0
        for response in self._stub.PullDiff(iter([request]), timeout=CALL_SECONDS):
            received += frames.wire_bytes(response)
            if response.HasField("header"):
                self._base = response.header.version
                self._acknowledged, self._image = response.header.reply_number, response.header.image
        return received

    @property
    def version(self) -> int | None:
        """Of the last reply."""
        return self._base

    def __enter__(self) -> "RawWorker":
        """Return the worker."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave."""
        self._stub.Leave(pb.LeaveRequest(identity=self._identity), timeout=CALL_SECONDS)
        self._channel.close()


def zeros(
    identity: pb.WorkerIdentity, generation: int, span: Span, chunk_bytes: int
) -> Iterator[pb.UploadModelRequest]:
    """Yield the upload of a shard of zeros."""
    yield pb.UploadModelRequest(header=pb.UploadHeader(identity=identity, generation=generation))
    checksum = frames.Checksum()
    for start in range(span.start, span.end, chunk_bytes // 4):
        piece = Span(start, min(span.end, start + chunk_bytes // 4))
        for chunk, _ in frames.encode(SparseSlice(piece, None, torch.zeros(piece.length)), chunk_bytes=chunk_bytes):
            checksum.add(chunk)
            yield pb.UploadModelRequest(chunk=chunk)
    yield pb.UploadModelRequest(commit=checksum.commit())

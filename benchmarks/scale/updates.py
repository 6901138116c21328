"""What the clients replay: encoded updates in files, one for each worker, shard and number; and the first upload."""

import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import numpy as np
import torch

from benchmarks.harness.load_generator import write_frames
from benchmarks.workload.layouts import noise_push
from benchmarks.workload.replay_worker import CALL_SECONDS
from benchmarks.workload.streams import push_requests
from pscore.model.layout import ModelLayout, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.net.proxies import NO_PROXY
from pscore.wire import frames
from pscore.wire.codecs.names import READABLE_INDEX_CODECS, READABLE_VALUE_CODECS
from pscore.wire.frames import DEFAULT_CHUNK_BYTES
from pscore.wire.messages import PROTOCOL_VERSION, layout_to_message
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub

UPDATES = 2
"""Different updates of a worker, in turn: between two pulls of another one each counts for the union."""


def write(directory: Path, layout: ModelLayout, density: float, shards: int, names: Sequence[str], seed: int) -> None:
    """Encode updates at random places for every worker."""
    rng = np.random.default_rng(seed)
    for name in names:
        for number in range(UPDATES):
            push = noise_push(layout, density, 0, rng)
            for shard, span in enumerate(layout.shard_spans(shards)):
                part = push.clip(span)
                assert part is not None
                messages = push_requests(
                    pb.WorkerIdentity(),
                    part,
                    [span],
                    step=0,
                    generation=0,
                    base_version=0,
                    chunk_bytes=DEFAULT_CHUNK_BYTES,
                )
                join = join_request(layout, shard, shards).SerializeToString()
                path = directory / f"{name}.{shard}.{number}"
                write_frames(path, [join, *(message.SerializeToString() for message in messages)])


def join_request(layout: ModelLayout, shard: int, shards: int) -> pb.JoinRequest:
    """Return a request to join, identity apart."""
    return pb.JoinRequest(
        identity=pb.WorkerIdentity(),
        protocol_version=PROTOCOL_VERSION,
        method="bench",
        layout=layout_to_message(layout),
        shard_index=shard,
        num_shards=shards,
        index_codecs=READABLE_INDEX_CODECS,
        value_codecs=READABLE_VALUE_CODECS,
    )


def upload(addresses: Sequence[str], layout: ModelLayout) -> None:
    """Give the shards a model of zeros."""
    shards, generation, run_id = len(addresses), 0, ""
    incarnation = str(uuid.uuid4())
    for shard, (address, span) in enumerate(zip(addresses, layout.shard_spans(shards), strict=True)):
        with grpc.insecure_channel(address, NO_PROXY) as channel:
            stub = ParameterServerServiceStub(channel)
            request = join_request(layout, shard, shards)
            request.identity.worker_id, request.identity.incarnation = "uploader", incarnation
            request.identity.run_id = run_id
            joined: pb.JoinResponse = stub.Join(request, timeout=CALL_SECONDS)
            if shard == 0:  # the coordinator says which generation it is
                generation, run_id = joined.generation, joined.run_id
            request.identity.run_id = run_id
            stub.UploadModel(_zeros(request.identity, generation, span), timeout=CALL_SECONDS)
            stub.Leave(pb.LeaveRequest(identity=request.identity), timeout=CALL_SECONDS)


def _zeros(identity: pb.WorkerIdentity, generation: int, span: Span) -> Iterator[pb.UploadModelRequest]:
    yield pb.UploadModelRequest(header=pb.UploadHeader(identity=identity, generation=generation))
    checksum = frames.Checksum()
    step = DEFAULT_CHUNK_BYTES // 4
    for start in range(span.start, span.end, step):
        piece = Span(start, min(span.end, start + step))
        zeros = SparseSlice(piece, None, torch.zeros(piece.length))
        for chunk, _ in frames.encode(zeros, chunk_bytes=DEFAULT_CHUNK_BYTES):
            checksum.add(chunk)
            yield pb.UploadModelRequest(chunk=chunk)
    yield pb.UploadModelRequest(commit=checksum.commit())

"""What the clients replay: encoded updates in files, one for each worker, shard and number; and the first upload."""

import uuid
from collections.abc import Sequence
from pathlib import Path

import grpc
import numpy as np

from benchmarks.harness.load_generator import write_frames
from benchmarks.workload.layouts import noise_push
from benchmarks.workload.raw_worker import join_request, zeros
from benchmarks.workload.replay_worker import CALL_SECONDS
from benchmarks.workload.streams import push_requests
from pscore.model.layout import ModelLayout
from pscore.net.proxies import NO_PROXY
from pscore.wire.frames import DEFAULT_CHUNK_BYTES
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
            stub.UploadModel(zeros(request.identity, generation, span, DEFAULT_CHUNK_BYTES), timeout=CALL_SECONDS)
            stub.Leave(pb.LeaveRequest(identity=request.identity), timeout=CALL_SECONDS)

"""A client in the raw stubs alone, as one would write it in another language: it joins, pushes, pulls and learns."""

import hashlib
import struct
import uuid
import zlib

import grpc
import numpy as np
import pytest

from psclient.rpc.local_server import LocalServer
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub

N, LR, TIMEOUT = 400, 0.2, 20.0


class RawWorker:
    def __init__(self, address: str, name: str, size: int = N):
        self.size = size
        self.channel = grpc.insecure_channel(address)
        self.stub = ParameterServerServiceStub(self.channel)
        self.identity = pb.WorkerIdentity(worker_id=name, incarnation=str(uuid.uuid4()))
        self.theta = np.zeros(size, np.float32)
        self.version, self.has_base, self.acknowledged, self.step = 0, False, 0, 0

    def join(self):
        parts = ("parameter", "w", str(self.size), "float32")
        fingerprint = hashlib.sha256(b"".join(struct.pack("<I", len(p)) + p.encode() for p in parts)).digest()
        layout = pb.ModelLayout(
            parameters=[pb.TensorSpec(name="w", shape=[self.size], data_type=pb.DATA_TYPE_FLOAT32)],
            fingerprint=fingerprint,
        )
        answer = self.stub.Join(
            pb.JoinRequest(
                identity=self.identity, protocol_version=2, method="raw", layout=layout, shard_index=0, num_shards=1
            ),
            timeout=TIMEOUT,
        )
        self.identity.run_id, self.generation = answer.run_id, answer.generation
        if answer.state == pb.JOIN_STATE_UPLOAD:
            self.upload()

    def upload(self):
        values = self.theta.tobytes()
        chunk = pb.Chunk(
            start=0,
            length=self.size,
            count=self.size,
            index_codec=pb.INDEX_CODEC_DENSE,
            value_codec=pb.VALUE_CODEC_FP32,
            values=values,
        )
        header = pb.UploadHeader(identity=self.identity, generation=self.generation)
        commit = pb.Commit(chunks=1, entries=self.size, crc32=zlib.crc32(values))
        self.stub.UploadModel(
            iter(
                [
                    pb.UploadModelRequest(header=header),
                    pb.UploadModelRequest(chunk=chunk),
                    pb.UploadModelRequest(commit=commit),
                ]
            ),
            timeout=TIMEOUT,
        )

    def push(self, index, values):
        self.step += 1
        raw_index = b"".join(struct.pack("<I", i) for i in index)
        raw_values = np.asarray(values, "<f4").tobytes()
        header = pb.PushHeader(
            identity=self.identity,
            step=self.step,
            generation=self.generation,
            base_version=self.version,
            samples=1,
            plan=[pb.Group(start=0, length=self.size)],
        )
        chunk = pb.Chunk(
            start=0,
            length=self.size,
            count=len(index),
            index_codec=pb.INDEX_CODEC_RAW32,
            value_codec=pb.VALUE_CODEC_FP32,
            indices=raw_index,
            values=raw_values,
        )
        commit = pb.Commit(chunks=1, entries=len(index), crc32=zlib.crc32(raw_values, zlib.crc32(raw_index)))
        request = pb.PushSparseRequest(header=header, chunks=[chunk], commit=commit)
        return next(self.stub.PushSparse(iter([request]), timeout=TIMEOUT))

    def pull(self):
        request = pb.PullDiffRequest(
            identity=self.identity,
            generation=self.generation,
            has_base=self.has_base,
            base_version=self.version,
            acknowledged_reply=self.acknowledged,
        )
        for message in self.stub.PullDiff(iter([request]), timeout=TIMEOUT):
            if message.HasField("header"):
                header = message.header
                assert header.mode == pb.REPLY_MODE_EXACT
            for chunk in message.chunks:
                offsets = decode_offsets(chunk)
                self.theta[chunk.start + offsets] = np.frombuffer(chunk.values, "<f4")
        self.version, self.has_base, self.acknowledged = header.version, True, header.reply_number


def decode_offsets(chunk: pb.Chunk) -> np.ndarray:
    """Written from the proto's comments, not from the library."""
    if chunk.index_codec == pb.INDEX_CODEC_DENSE:
        return np.arange(chunk.length)
    if chunk.index_codec == pb.INDEX_CODEC_RAW32:
        return np.frombuffer(chunk.indices, "<u4").astype(np.int64)
    assert chunk.index_codec == pb.INDEX_CODEC_BITMAP, "Rice does not pay for so few entries"
    return np.flatnonzero(np.unpackbits(np.frombuffer(chunk.indices, np.uint8), bitorder="little"))


def test_two_raw_workers_train_a_least_squares_problem():
    target = np.random.default_rng(0).normal(size=N).astype(np.float32)
    with LocalServer(down_mode="exact") as server:
        workers = [RawWorker(server.addresses[0], f"raw-{i}") for i in range(2)]
        for worker in workers:
            worker.join()
            worker.pull()
        for step in range(300):
            worker = workers[step % 2]
            gradient = worker.theta - target
            index = np.sort(np.argsort(-np.abs(gradient))[:40])
            answer = worker.push(index, LR * gradient[index])
            assert answer.version == step + 1
            worker.pull()
        for worker in workers:
            worker.pull()
            assert np.abs(worker.theta - target).max() < 0.05
        assert np.array_equal(workers[0].theta, workers[1].theta)


def test_a_repeated_push_gets_its_first_answer():
    with LocalServer(down_mode="exact") as server:
        worker = RawWorker(server.addresses[0], "raw")
        worker.join()
        worker.pull()
        first = worker.push([1, 5], [1.0, 2.0])
        worker.step -= 1
        second = worker.push([1, 5], [1.0, 2.0])
        assert (second.version, second.repeated_push) == (first.version, True)
        worker.pull()
        assert worker.theta[1] == pytest.approx(-1.0)

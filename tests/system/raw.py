"""A client in the raw stubs alone, as one would write it in another language, and the messages that it sends."""

import hashlib
import queue
import struct
import uuid
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import grpc
import numpy as np
import pytest

from psclient.errors import Transient, from_rpc_error
from pscore.wire.errors import ErrorCode, Rejected, details_of
from pscore.wire.protocol import NEWEST_PROTOCOL
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from tests.packed import packed

N, TIMEOUT = 400, 20.0


def layout_of(size: int) -> pb.PackedLayout:
    """A model of one tensor, with its fingerprint."""
    parts = ("parameter", "w", str(size), "float32")
    fingerprint = hashlib.sha256(b"".join(struct.pack("<I", len(p)) + p.encode() for p in parts)).digest()
    tensor = pb.TensorSpec(name="w", shape=[size], data_type=pb.DATA_TYPE_FLOAT32)
    return packed(pb.ModelLayout(parameters=[tensor]), fingerprint=fingerprint)


def chunk_of(index: Iterable[int], values: Iterable[float], **fields: Any) -> pb.Chunk:
    """Entries of a model of ``N`` elements."""
    indices, raw = np.asarray(index, "<u4").tobytes(), np.asarray(values, "<f4").tobytes()
    sparse = {"index_codec": pb.INDEX_CODEC_RAW32, "indices": indices, "length": N, "count": len(indices) // 4}
    return pb.Chunk(**{**sparse, "value_codec": pb.VALUE_CODEC_FP32, "values": raw, **fields})


def dense_chunk(values: bytes, start: int = 0) -> pb.Chunk:
    """Values in fp32 for every element from ``start`` on."""
    count = len(values) // 4
    codecs = {"index_codec": pb.INDEX_CODEC_DENSE, "value_codec": pb.VALUE_CODEC_FP32}
    return pb.Chunk(start=start, length=count, count=count, values=values, **codecs)


def commit_of(*chunks: pb.Chunk, **fields: int) -> pb.Commit:
    crc = 0
    for each in chunks:
        crc = zlib.crc32(each.values, zlib.crc32(each.indices, crc))
    return pb.Commit(**{"chunks": len(chunks), "entries": sum(each.count for each in chunks), "crc32": crc, **fields})


class RawWorker:
    def __init__(self, address: str, name: str, size: int = N, channel: grpc.Channel | None = None):
        self.size = size
        self.channel = channel or grpc.insecure_channel(address)
        self.stub = ParameterServerServiceStub(self.channel)
        self.identity = pb.WorkerIdentity(worker_id=name, incarnation=str(uuid.uuid4()))
        self.theta = np.zeros(size, np.float32)
        self.version, self.has_base, self.acknowledged, self.step = 0, False, 0, 0

    def join_request(self, **fields: Any) -> pb.JoinRequest:
        given = {"protocol_version": NEWEST_PROTOCOL, "method": "raw", "num_shards": 1, **fields}
        return pb.JoinRequest(**{"identity": self.identity, "layout": layout_of(self.size), **given})

    def join(self, **fields: Any) -> pb.JoinResponse:
        answer = self.stub.Join(self.join_request(**fields), timeout=TIMEOUT)
        self.identity.run_id, self.generation = answer.run_id, answer.generation
        if answer.state == pb.JOIN_STATE_UPLOAD:
            self.upload()
        return answer

    def upload(self) -> None:
        header = pb.UploadHeader(identity=self.identity, generation=self.generation)
        values, most = self.theta.tobytes(), 1_000_000
        chunks = [dense_chunk(values[at : at + most], at // 4) for at in range(0, len(values), most)]
        parts = [{"header": header}, *({"chunk": chunk} for chunk in chunks), {"commit": commit_of(*chunks)}]
        self.stub.UploadModel((pb.UploadModelRequest(**part) for part in parts), timeout=TIMEOUT)

    def push_header(self, **fields: Any) -> pb.PushHeader:
        """Of the next push."""
        base = {"generation": self.generation, "base_version": self.version, "samples": 1}
        plan = [pb.Group(start=0, length=self.size)]
        return pb.PushHeader(**{"identity": self.identity, "step": self.step + 1, "plan": plan, **base, **fields})

    def push(self, index: Iterable[int], values: Iterable[float]) -> pb.PushSparseResponse:
        return self.push_chunks(chunk_of(index, values, length=self.size))

    def push_chunks(self, *chunks: pb.Chunk) -> pb.PushSparseResponse:
        """Push; in one message if it is one chunk."""
        parts = [{"header": self.push_header()}, *({"chunks": [each]} for each in chunks)]
        parts.append({"commit": commit_of(*chunks)})
        if len(chunks) == 1:
            parts = [parts[0] | parts[1] | parts[2]]
        self.step += 1
        return next(self.stub.PushSparse((pb.PushSparseRequest(**part) for part in parts), timeout=TIMEOUT))

    def pull_request(self, **fields: Any) -> pb.PullDiffRequest:
        return pb.PullDiffRequest(identity=self.identity, generation=self.generation, **fields)

    def pull(self) -> None:
        request = self.pull_request(
            has_base=self.has_base, base_version=self.version, acknowledged_reply=self.acknowledged
        )
        for message in self.stub.PullDiff(iter([request]), timeout=TIMEOUT):
            if message.HasField("header"):
                header = message.header
                assert header.mode == pb.REPLY_MODE_EXACT
            for chunk in message.chunks:
                offsets = decode_offsets(chunk)
                self.theta[chunk.start + offsets] = np.frombuffer(chunk.values, "<f4")
        self.version, self.has_base, self.acknowledged = header.version, True, header.reply_number


def joined(address: str, size: int = N, name: str = "") -> RawWorker:
    """A worker that has joined and pulled."""
    worker = RawWorker(address, name or f"raw-{uuid.uuid4()}", size)
    worker.join()
    worker.pull()
    return worker


def decode_offsets(chunk: pb.Chunk) -> np.ndarray:
    """Written from the proto's comments, not from the library."""
    if chunk.index_codec == pb.INDEX_CODEC_DENSE:
        return np.arange(chunk.length)
    if chunk.index_codec == pb.INDEX_CODEC_RAW32:
        return np.frombuffer(chunk.indices, "<u4").astype(np.int64)
    assert chunk.index_codec == pb.INDEX_CODEC_BITMAP, "Rice does not pay for so few entries"
    return np.flatnonzero(np.unpackbits(np.frombuffer(chunk.indices, np.uint8), bitorder="little"))


class Stream:
    """A stream of one method, to which messages are sent one by one."""

    def __init__(self, method: Callable[..., Any]):
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.call = method(iter(self._outbox.get, None))

    def send(self, *messages: Any) -> None:
        for message in messages:
            self._outbox.put(message)

    def end(self) -> None:
        self._outbox.put(None)

    def reason(self) -> ErrorCode:
        """Why the server has ended it."""
        with pytest.raises(grpc.RpcError) as caught:
            next(self.call)
        return details_of(caught.value).reason


def pull_of(worker: RawWorker, **fields: Any) -> pb.PullDiffRequest:
    return worker.pull_request(has_base=True, **fields)


def push_of(worker: RawWorker, step: int, *, base: int = 0, cut: int = 1, **fields: Any) -> list[pb.PushSparseRequest]:
    """A push of 1.0 at index ``step``, over ``cut`` messages."""
    chunk = chunk_of([0], [1], start=step, length=1)
    header, commit = worker.push_header(step=step, base_version=base, **fields), commit_of(chunk)
    parts: list[list[dict[str, Any]]] = [
        [{"header": header, "chunks": [chunk], "commit": commit}],
        [{"header": header}, {"chunks": [chunk], "commit": commit}],
        [{"header": header}, {"chunks": [chunk]}, {"commit": commit}],
    ]
    return [pb.PushSparseRequest(**part) for part in parts[cut - 1]]


def outcome(call: Callable[[], Any]) -> tuple[str, str | None, str] | None:
    """Return status, reason and words of a call's refusal, or ``None``; a stream is read to its end."""
    try:
        answer = call()
        if isinstance(answer, grpc.Call):
            list(answer)
    except grpc.RpcError as error:
        failure = from_rpc_error(error)
        reason = failure.reason if isinstance(failure, Rejected | Transient) else None
        return error.code().name, reason.name if reason else None, error.details()
    return None


def refusal(call: Callable[[], Any]) -> tuple[str, str | None]:
    """Return status and reason of a call that must be refused."""
    found = outcome(call)
    if found is None:
        pytest.fail("the call was taken")
    return found[:2]

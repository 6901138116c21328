"""The protocol in the stubs and numpy alone, as another language would speak it: nothing is shared with the library.

Pushes travel as ``RAW32`` or ``DENSE`` indices and ``FP32`` values, so what is sent is what a reader of the log sees.
"""

import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import grpc
import numpy as np
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status
from numpy.typing import NDArray

from pscore.net.proxies import NO_PROXY
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub

Floats = NDArray[np.float32]
Offsets = NDArray[np.uint32]

Values = Floats | NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]

CHUNK_ENTRIES = 4096
_DTYPES = {
    pb.VALUE_CODEC_FP32: "<f4",
    pb.VALUE_CODEC_WORD8: "<u1",
    pb.VALUE_CODEC_WORD16: "<u2",
    pb.VALUE_CODEC_WORD32: "<u4",
}
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection
)


class Line:
    """A channel to one shard, replaceable."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, (*_OPTIONS, *NO_PROXY))
        self.stub = ParameterServerServiceStub(self._channel)

    def renew(self) -> None:
        """Dial anew."""
        self._channel.close()
        self._channel = grpc.insecure_channel(self.address, (*_OPTIONS, *NO_PROXY))
        self.stub = ParameterServerServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()


@dataclass(frozen=True, slots=True)
class Push:
    """One shard's part of a push: everything that its bytes depend on.

    Attributes:
        run: id of the run.
        worker: who pushes.
        incarnation: in which life.
        shard: to which shard.
        step: of that life.
        generation: of the model.
        base: version that the worker knew.
        start: first index of the shard.
        length: elements of the shard.
        offsets: uint32 ``[k]``, ascending, from ``start``; ``None`` for every element.
        values: fp32 ``[k]``.
    """

    run: str
    worker: str
    incarnation: str
    shard: int
    step: int
    generation: int
    base: int
    start: int
    length: int
    offsets: Offsets | None
    values: Floats

    @property
    def identity(self) -> pb.WorkerIdentity:
        return pb.WorkerIdentity(run_id=self.run, worker_id=self.worker, incarnation=self.incarnation)

    def messages(self) -> list[pb.PushSparseRequest]:
        """Write the stream; the same bytes each time."""
        header = pb.PushHeader(
            identity=self.identity,
            step=self.step,
            generation=self.generation,
            base_version=self.base,
            samples=1,
            plan=[pb.Group(start=self.start, length=self.length)],
        )
        chunks = list(_chunks(self.start, self.offsets, self.values))
        crc = 0
        for chunk in chunks:
            crc = zlib.crc32(chunk.values, zlib.crc32(chunk.indices, crc))
        commit = pb.Commit(chunks=len(chunks), entries=len(self.values), crc32=crc)
        return [
            pb.PushSparseRequest(header=header),
            *(pb.PushSparseRequest(chunks=[chunk]) for chunk in chunks),
            pb.PushSparseRequest(commit=commit),
        ]


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer to a pull, as a worker has read it to its end.

    Attributes:
        incarnation: the life that pulled.
        shard: from which shard.
        number: which acknowledges it.
        version: of the replica with it.
        topk: whether its entries are added; else they are written.
        image: whether the server keeps an image of the replica from it on.
        whole: whether it is every element.
        applied: whether the worker has applied it, and not thrown it away as if it had been lost.
        digest: of the replica with it.
        offsets: uint32 ``[k]``; of an exact reply none is kept.
        values: fp32 ``[k]``, likewise.
    """

    incarnation: str
    shard: int
    number: int
    version: int
    topk: bool
    image: bool
    whole: bool
    applied: bool
    digest: str
    offsets: Offsets
    values: Floats


def _chunks(start: int, offsets: Offsets | None, values: Floats) -> Iterator[pb.Chunk]:
    for first in range(0, len(values), CHUNK_ENTRIES):
        piece = values[first : first + CHUNK_ENTRIES]
        if offsets is None:
            yield pb.Chunk(
                start=start + first,
                length=len(piece),
                count=len(piece),
                index_codec=pb.INDEX_CODEC_DENSE,
                value_codec=pb.VALUE_CODEC_FP32,
                values=piece.astype("<f4").tobytes(),
            )
            continue
        places = offsets[first : first + CHUNK_ENTRIES]
        yield pb.Chunk(
            start=start + int(places[0]),
            length=int(places[-1] - places[0]) + 1,
            count=len(places),
            index_codec=pb.INDEX_CODEC_RAW32,
            value_codec=pb.VALUE_CODEC_FP32,
            indices=(places - places[0]).astype("<u4").tobytes(),
            values=piece.astype("<f4").tobytes(),
        )


TENSOR = "w"
"""The one tensor of the model."""


def join_request(worker: str, incarnation: str, run: str, size: int, shard: int, shards: int) -> pb.JoinRequest:
    """Ask for a lease, with a model of one tensor; readable are ``DENSE`` and ``RAW32`` alone."""
    parts = ("parameter", TENSOR, str(size), "float32")
    tensor = pb.TensorSpec(name=TENSOR, shape=[size], data_type=pb.DATA_TYPE_FLOAT32)
    return pb.JoinRequest(
        identity=pb.WorkerIdentity(run_id=run, worker_id=worker, incarnation=incarnation),
        protocol_version=3,
        method="chaos",
        layout=pb.PackedLayout(
            pieces=[zlib.compress(pb.ModelLayout(parameters=[tensor]).SerializeToString())],
            fingerprint=hashlib.sha256(b"".join(len(p).to_bytes(4, "little") + p.encode() for p in parts)).digest(),
        ),
        shard_index=shard,
        num_shards=shards,
    )


def upload(addresses: list[str], values: Floats, incarnation: str, timeout: float) -> None:
    """Give every shard its part of a model, the coordinator last, and leave."""
    stubs = [Line(address) for address in addresses]
    generation, run = 0, ""
    worker = "uploader"
    try:
        for shard in reversed(range(len(stubs))):
            request = join_request(worker, incarnation, "", len(values), shard, len(stubs))
            answer = stubs[shard].stub.Join(request, timeout=timeout)
            generation, run = answer.generation, answer.run_id
        identity = pb.WorkerIdentity(run_id=run, worker_id=worker, incarnation=incarnation)
        for shard in reversed(range(len(stubs))):
            status = stubs[shard].stub.GetStatus(pb.GetStatusRequest(), timeout=timeout)
            part = values[status.start : status.start + status.length]
            chunks = list(_chunks(status.start, None, part))
            crc = 0
            for chunk in chunks:
                crc = zlib.crc32(chunk.values, crc)
            header = pb.UploadHeader(identity=identity, generation=generation)
            commit = pb.Commit(chunks=len(chunks), entries=len(part), crc32=crc)
            messages = [
                pb.UploadModelRequest(header=header),
                *(pb.UploadModelRequest(chunk=chunk) for chunk in chunks),
                pb.UploadModelRequest(commit=commit),
            ]
            stubs[shard].stub.UploadModel(iter(messages), timeout=timeout)
        for line in stubs:
            line.stub.Leave(pb.LeaveRequest(identity=identity), timeout=timeout)
    finally:
        for line in stubs:
            line.close()


@dataclass(frozen=True, slots=True)
class Download:
    """A shard as it is sent to anybody.

    Attributes:
        version: of these values.
        generation: of the model.
        start: first index of the shard, in values.
        values: ``[length]``: fp32, or the words of a feed.
        layout: the model's, as the server tells it.
    """

    version: int
    generation: int
    start: int
    values: Values
    layout: pb.PackedLayout


def download(address: str, timeout: float) -> Download:
    """Fetch a shard's values."""
    line = Line(address)
    try:
        header, values, came = pb.DownloadHeader(), np.empty(0, np.float32), 0
        for message in line.stub.DownloadModel(pb.DownloadModelRequest(), timeout=timeout):
            kind = message.WhichOneof("message")
            if kind == "header":
                header = message.header
                layout = pb.ModelLayout.FromString(b"".join(map(zlib.decompress, header.layout.pieces)))
                width = layout.word_bytes
                values = np.zeros(header.length, f"<u{width}" if width else "<f4")
            elif kind == "chunk":
                offsets, piece = entries_of(message.chunk, header.start)
                values[offsets] = piece
                came += len(piece)
        if came != len(values):
            raise ValueError(f"{came} of {len(values)} values came")
        return Download(header.version, header.generation, header.start, values, header.layout)
    finally:
        line.close()


def entries_of(chunk: pb.Chunk, start: int) -> tuple[Offsets, Any]:
    """Return a chunk's offsets in a shard that begins at ``start``, and its values: fp32, or words."""
    if chunk.value_codec not in _DTYPES:
        raise ValueError(f"values in codec {chunk.value_codec}, which was not offered")
    first = chunk.start - start
    values = np.frombuffer(chunk.values, _DTYPES[chunk.value_codec])
    if chunk.index_codec == pb.INDEX_CODEC_DENSE:
        return np.arange(first, first + chunk.length, dtype=np.uint32), values
    if chunk.index_codec == pb.INDEX_CODEC_RAW32:
        return np.frombuffer(chunk.indices, "<u4") + np.uint32(first), values
    raise ValueError(f"indices in codec {chunk.index_codec}, which was not offered")


def digest(values: Values) -> str:
    """Name an array by its bits."""
    return hashlib.blake2b(values.tobytes(), digest_size=12).hexdigest()


def rounded_digest(values: Floats) -> str:
    """Name what readers in bfloat16 have of an array: the upper halves, rounded to nearest even."""
    bits = values.view(np.uint32)
    upper, rest = bits >> 16, bits & 0xFFFF
    rounded = upper + ((rest > 0x8000) | ((rest == 0x8000) & (upper & 1 == 1)))
    return "bf16 " + hashlib.blake2b(rounded.astype("<u2").tobytes(), digest_size=12).hexdigest()


def reason_of(error: grpc.RpcError) -> str:
    """Return the reason of a refusal, as the proto names it; empty where the call was not refused but failed."""
    status = rpc_status.from_call(cast(grpc.Call, error))
    for detail in status.details if status is not None else ():
        info = ErrorInfo()
        if detail.Is(ErrorInfo.DESCRIPTOR) and detail.Unpack(info) and info.domain == "sparseps":
            return str(info.reason).removeprefix("REFUSAL_REASON_")
    return ""

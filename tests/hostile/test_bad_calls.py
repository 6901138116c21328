"""Bad input over the wire: each is refused with a status and a reason, nothing is applied, and the server goes on."""

import struct
import threading
import time
import uuid
import zlib

import grpc
import pytest
import torch

import psclient
from psclient.errors import Transient, from_rpc_error
from psclient.rpc.local_server import LocalServer
from pscore.wire.errors import Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.system.connecting.test_raw_client import TIMEOUT, N, RawWorker


@pytest.fixture(scope="module")
def server():
    with LocalServer(down_mode="exact", lease_seconds=120) as running:
        yield running


@pytest.fixture
def worker(server):
    raw = RawWorker(server.addresses[0], f"raw-{uuid.uuid4()}")
    raw.join()
    raw.pull()
    return raw


@pytest.fixture
def unharmed(server, worker):
    """The parameters and the version are the same after the test as before it."""
    before = psclient.download(server.server)["w"]
    version = worker.version
    yield
    worker.pull()
    assert worker.version == version
    assert torch.equal(psclient.download(server.server)["w"], before)
    answer = worker.push([3], [0.5])  # and it still takes a good push
    assert answer.version == version + 1


def chunk(index, values, **fields):
    fields = {
        "start": 0,
        "length": N,
        "count": len(index),
        "index_codec": pb.INDEX_CODEC_RAW32,
        "value_codec": pb.VALUE_CODEC_FP32,
        "indices": struct.pack(f"<{len(index)}I", *index),
        "values": struct.pack(f"<{len(values)}f", *values),
    } | fields
    return pb.Chunk(**fields)


def header(worker, **fields):
    fields = {
        "identity": worker.identity,
        "step": worker.step + 1,
        "generation": worker.generation,
        "base_version": worker.version,
        "plan": [pb.Group(start=0, length=N)],
    } | fields
    return pb.PushSparseRequest(header=pb.PushHeader(**fields))


def commit(*chunks, **fields):
    crc = 0
    for each in chunks:
        crc = zlib.crc32(each.values, zlib.crc32(each.indices, crc))
    fields = {"chunks": len(chunks), "entries": sum(each.count for each in chunks), "crc32": crc} | fields
    return pb.PushSparseRequest(commit=pb.Commit(**fields))


def push(worker, *chunks, head=None, end=None):
    messages = [head or header(worker), *(pb.PushSparseRequest(chunks=[each]) for each in chunks)]
    messages.append(end or commit(*chunks))
    return next(worker.stub.PushSparse(iter(messages), timeout=TIMEOUT))


def refusal(call) -> tuple[str, str]:
    """Return status and reason of a call that must be refused."""

    def finished():
        result = call()
        return list(result) if isinstance(result, grpc.Call) else result

    with pytest.raises(grpc.RpcError) as caught:
        finished()
    failure = from_rpc_error(caught.value)
    assert isinstance(failure, Rejected | Transient), failure
    assert failure.reason is not None
    return caught.value.code().name, failure.reason.name


BAD_CHUNKS = {
    "index out of range": chunk([1, N], [1, 1]),
    "unsorted": chunk([5, 4], [1, 1]),
    "repeated": chunk([5, 5], [1, 1]),
    "too few values": chunk([1, 2], [1]),
    "too many values": chunk([1, 2], [1, 2, 3]),
    "too few indices": chunk([1, 2], [1, 2], indices=b"\0\0\0\0"),
    "ragged index bytes": chunk([1, 2], [1, 2], indices=b"\0\0\0\0\1"),
    "count above length": chunk([1, 2], [1, 2], length=1),
    "empty": chunk([], []),
    "beyond the model": chunk([0], [1], start=N - 1, length=2),
    "far beyond the model": chunk([0], [1], start=2**63, length=1),
    "huge count": chunk([1], [1], count=2**32 - 1),
    "unknown group": chunk([1], [1], group=7),
    "dense with index bytes": chunk([0], [1], length=1, index_codec=pb.INDEX_CODEC_DENSE),
    "dense with a hole": chunk([0], [1], length=2, indices=b"", index_codec=pb.INDEX_CODEC_DENSE),
    "empty bitmap": chunk([1], [1], indices=b"", index_codec=pb.INDEX_CODEC_BITMAP),
    "endless quotients": chunk([1], [1], indices=b"\xff\xff\xff\xff\0\1", index_codec=pb.INDEX_CODEC_RICE),
}


@pytest.mark.parametrize("name", BAD_CHUNKS)
def test_bad_chunk(worker, unharmed, name):
    assert refusal(lambda: push(worker, BAD_CHUNKS[name])) == ("INVALID_ARGUMENT", "BAD_CHUNK")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_value(worker, unharmed, value):
    assert refusal(lambda: push(worker, chunk([1], [value]))) == ("INVALID_ARGUMENT", "NON_FINITE")


@pytest.mark.parametrize("fields", [{"index_codec": 77}, {"value_codec": 77}, {"index_codec": 0}, {"value_codec": 0}])
def test_unknown_codec_is_unimplemented(worker, unharmed, fields):
    assert refusal(lambda: push(worker, chunk([1], [1], **fields))) == ("UNIMPLEMENTED", "UNKNOWN_CODEC")


@pytest.mark.parametrize("fields", [{"chunks": 2}, {"entries": 5}, {"crc32": 1}])
def test_bad_commit(worker, unharmed, fields):
    good = chunk([1], [1])
    answer = refusal(lambda: push(worker, good, end=commit(good, **fields)))
    assert answer == ("INVALID_ARGUMENT", "BAD_COMMIT")


def test_the_same_place_twice(worker, unharmed):
    twice = [chunk([1], [1]), chunk([1], [1])]
    assert refusal(lambda: push(worker, *twice)) == ("INVALID_ARGUMENT", "BAD_CHUNK")


@pytest.mark.parametrize(
    "plan",
    [
        [pb.Group(start=0, length=N + 1)],
        [pb.Group(start=0, length=10), pb.Group(start=9, length=2)],
        [pb.Group(start=2**63, length=2**63)],
    ],
)
def test_bad_plan(worker, unharmed, plan):
    answer = refusal(lambda: push(worker, chunk([1], [1]), head=header(worker, plan=plan)))
    assert answer == ("INVALID_ARGUMENT", "BAD_REQUEST")


def test_a_stream_without_header_commit_or_sense(worker, unharmed):
    good = pb.PushSparseRequest(chunks=[chunk([1], [1])])
    send = worker.stub.PushSparse
    assert refusal(lambda: send(iter([good]), timeout=TIMEOUT))[1] == "BAD_REQUEST"
    assert list(send(iter([]), timeout=TIMEOUT)) == []
    assert refusal(lambda: send(iter([pb.PushSparseRequest()]), timeout=TIMEOUT))[1] == "BAD_REQUEST"
    assert refusal(lambda: send(iter([header(worker), good]), timeout=TIMEOUT))[1] == "BAD_COMMIT"
    assert refusal(lambda: send(iter([header(worker), header(worker)]), timeout=TIMEOUT))[1] == "BAD_REQUEST"
    empty = [header(worker), pb.PushSparseRequest()]
    assert refusal(lambda: send(iter(empty), timeout=TIMEOUT))[1] == "BAD_REQUEST"


def test_a_stream_cut_in_the_middle(worker, unharmed):
    release = threading.Event()

    def messages():
        yield header(worker)
        yield pb.PushSparseRequest(chunks=[chunk([1], [1])])
        release.wait(TIMEOUT)

    call = worker.stub.PushSparse(messages(), timeout=TIMEOUT)
    call.cancel()
    release.set()
    assert call.cancelled()


def test_unknown_worker_wrong_incarnation_wrong_run(worker, unharmed):
    def identity(**fields):
        changed = pb.WorkerIdentity()
        changed.CopyFrom(worker.identity)
        for name, value in fields.items():
            setattr(changed, name, value)
        return header(worker, identity=changed)

    for head, expected in (
        (identity(worker_id="nobody"), ("NOT_FOUND", "LEASE_EXPIRED")),
        (identity(incarnation="other"), ("NOT_FOUND", "LEASE_EXPIRED")),
        (identity(run_id="other"), ("FAILED_PRECONDITION", "RUN_MISMATCH")),
        (identity(worker_id=""), ("INVALID_ARGUMENT", "BAD_REQUEST")),
        (identity(worker_id="x" * 1000), ("INVALID_ARGUMENT", "BAD_REQUEST")),
        (header(worker, generation=worker.generation + 1), ("FAILED_PRECONDITION", "STALE_GENERATION")),
        (header(worker, step=0), ("INVALID_ARGUMENT", "BAD_REQUEST")),
        (header(worker, base_version=10**6), ("OUT_OF_RANGE", "VERSION_IN_FUTURE")),
    ):
        assert refusal(lambda head=head: push(worker, chunk([1], [1]), head=head)) == expected


def test_an_older_step_is_out_of_order(worker):
    worker.step = 10
    worker.push([1], [0.0])
    worker.step = 3
    assert refusal(lambda: worker.push([1], [0.0])) == ("FAILED_PRECONDITION", "STEP_OUT_OF_ORDER")


def test_a_pull_from_a_future_version(worker, unharmed):
    request = pb.PullDiffRequest(
        identity=worker.identity, generation=worker.generation, has_base=True, base_version=10**9
    )
    answer = refusal(lambda: worker.stub.PullDiff(iter([request]), timeout=TIMEOUT))
    assert answer == ("OUT_OF_RANGE", "VERSION_IN_FUTURE")


def join_request(worker, **fields):
    layout = pb.ModelLayout(
        parameters=[pb.TensorSpec(name="w", shape=[N + 1], data_type=pb.DATA_TYPE_FLOAT32)], fingerprint=b"x"
    )
    identity = pb.WorkerIdentity(worker_id=f"new-{uuid.uuid4()}", incarnation="i")
    fields = {
        "identity": identity, "protocol_version": 2, "method": "raw", "layout": layout, "num_shards": 1
    } | fields  # fmt: skip
    return pb.JoinRequest(**fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"protocol_version": 99}, ("UNIMPLEMENTED", "UNKNOWN_PROTOCOL")),
        ({"num_shards": 3}, ("FAILED_PRECONDITION", "SHARD_MISMATCH")),
        ({}, ("FAILED_PRECONDITION", "FINGERPRINT_MISMATCH")),
        ({"layout": pb.ModelLayout()}, ("FAILED_PRECONDITION", "FINGERPRINT_MISMATCH")),
        (
            {"layout": pb.ModelLayout(parameters=[pb.TensorSpec(name="w", shape=[2**40, 2**40], data_type=1)])},
            ("FAILED_PRECONDITION", "FINGERPRINT_MISMATCH"),
        ),
        (  # a fingerprint that is not the layout's
            {"layout": pb.ModelLayout(parameters=[pb.TensorSpec(name="w", shape=[N], data_type=1)], fingerprint=b"x")},
            ("INVALID_ARGUMENT", "BAD_REQUEST"),
        ),
        ({"loaded": pb.LoadedModel(digest=b"x" * 31)}, ("INVALID_ARGUMENT", "BAD_REQUEST")),
        ({"loaded": pb.LoadedModel(replaces=True)}, ("INVALID_ARGUMENT", "BAD_REQUEST")),
    ],
)
def test_bad_join(worker, unharmed, fields, expected):
    assert refusal(lambda: worker.stub.Join(join_request(worker, **fields), timeout=TIMEOUT)) == expected


def test_an_upload_over_a_living_model(worker, unharmed):
    header = pb.UploadHeader(identity=worker.identity, generation=worker.generation)
    answer = refusal(lambda: worker.stub.UploadModel(iter([pb.UploadModelRequest(header=header)]), timeout=TIMEOUT))
    assert answer == ("ALREADY_EXISTS", "ALREADY_UPLOADED")
    header.digest = b"x" * 33
    answer = refusal(lambda: worker.stub.UploadModel(iter([pb.UploadModelRequest(header=header)]), timeout=TIMEOUT))
    assert answer == ("INVALID_ARGUMENT", "BAD_REQUEST")
    newer = worker.generation + (1 << 32)
    head = pb.UploadModelRequest(header=pb.UploadHeader(identity=worker.identity, generation=newer))
    answer = refusal(lambda: worker.stub.UploadModel(iter([head]), timeout=TIMEOUT))
    assert answer == ("FAILED_PRECONDITION", "STALE_GENERATION")


def test_a_refused_upload_is_answered_although_its_client_sends_no_more(worker, unharmed):
    answered = threading.Event()

    def requests():
        header = pb.UploadHeader(identity=worker.identity, generation=worker.generation)
        yield pb.UploadModelRequest(header=header)
        answered.wait(TIMEOUT)

    began = time.monotonic()
    answer = refusal(lambda: worker.stub.UploadModel(requests(), timeout=TIMEOUT))
    assert answer == ("ALREADY_EXISTS", "ALREADY_UPLOADED")
    assert time.monotonic() - began < TIMEOUT / 2
    answered.set()


def test_buffers_where_there_are_none(worker, unharmed):
    head = pb.BuffersHeader(
        identity=worker.identity, step=1, generation=worker.generation, samples=1, buffer_bytes=2**62
    )
    request = pb.ExchangeBuffersRequest(header=head)
    answer = refusal(lambda: worker.stub.ExchangeBuffers(iter([request]), timeout=TIMEOUT))
    assert answer == ("INVALID_ARGUMENT", "BAD_REQUEST")


def test_garbage_instead_of_a_message(server, worker, unharmed):
    with grpc.insecure_channel(server.addresses[0]) as channel:
        call = channel.unary_unary("/sparseps.v1.ParameterServerService/Join")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\xff" * 100, timeout=TIMEOUT)
        assert caught.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)


def test_a_message_beyond_the_limit(worker, unharmed):
    too_large = chunk([0], [1])
    too_large.values = bytes(5 << 20)
    with pytest.raises(grpc.RpcError) as caught:
        push(worker, too_large)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

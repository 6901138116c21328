"""Bad input over the wire: each is refused with a status and a reason, nothing is applied, and the server goes on.

Chunks that lie are in corpus/.
"""

import threading
import time

import grpc
import pytest
import torch

import psclient
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.packed import packed
from tests.system.raw import TIMEOUT, N, RawWorker, chunk_of, commit_of, refusal

GOOD = chunk_of([1], [1])
CHUNK = pb.PushSparseRequest(chunks=[GOOD])


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


def header(worker, **fields):
    return pb.PushSparseRequest(header=worker.push_header(**fields))


def push(worker, *chunks, head=None, end=None):
    messages = [head or header(worker), *(pb.PushSparseRequest(chunks=[each]) for each in chunks)]
    messages.append(pb.PushSparseRequest(commit=end or commit_of(*chunks)))
    return next(worker.stub.PushSparse(iter(messages), timeout=TIMEOUT))


def as_(worker, **fields):
    """The worker's identity, with other fields."""
    return pb.WorkerIdentity(**{name: getattr(worker.identity, name) for name in IDENTITY} | fields)


IDENTITY = [field.name for field in pb.WorkerIdentity.DESCRIPTOR.fields]
STRANGERS = [
    ({"worker_id": "nobody"}, ("NOT_FOUND", "LEASE_EXPIRED")),
    ({"incarnation": "other"}, ("NOT_FOUND", "LEASE_EXPIRED")),
    ({"run_id": "other"}, ("FAILED_PRECONDITION", "RUN_MISMATCH")),
    ({"worker_id": ""}, ("INVALID_ARGUMENT", "BAD_REQUEST")),
    ({"worker_id": "x" * 1000}, ("INVALID_ARGUMENT", "BAD_REQUEST")),
]
BAD_CHUNK, BAD_COMMIT, BAD_REQUEST = (("INVALID_ARGUMENT", f"BAD_{what}") for what in ("CHUNK", "COMMIT", "REQUEST"))
UNKNOWN_CODEC, IN_FUTURE = ("UNIMPLEMENTED", "UNKNOWN_CODEC"), ("OUT_OF_RANGE", "VERSION_IN_FUTURE")
BAD_PUSHES = {
    "beyond the model": (lambda w: {"chunks": [chunk_of([0], [1], start=N - 1, length=2)]}, BAD_CHUNK),
    "unknown group": (lambda w: {"chunks": [chunk_of([1], [1], group=7)]}, BAD_CHUNK),
    "the same place twice": (lambda w: {"chunks": [GOOD, GOOD]}, BAD_CHUNK),
    **{
        f"{field} {number}": (lambda w, f=field, n=number: {"chunks": [chunk_of([1], [1], **{f: n})]}, UNKNOWN_CODEC)
        for field in ("index_codec", "value_codec")
        for number in (0, 77)
    },
    **{
        f"commit with other {field}": (lambda w, f=field: {"end": commit_of(GOOD, **{f: 2})}, BAD_COMMIT)
        for field in ("chunks", "entries", "crc32")
    },
    **{
        f"plan {plan}": (
            lambda w, p=plan: {"head": header(w, plan=[pb.Group(start=a, length=n) for a, n in p])},
            BAD_REQUEST,
        )
        for plan in ([(0, N + 1)], [(0, 10), (9, 2)], [(2**63, 2**63)])
    },
    **{
        f"of another {fields}"[:40]: (lambda w, f=fields: {"head": header(w, identity=as_(w, **f))}, expected)
        for fields, expected in STRANGERS
    },
    "a generation": (
        lambda w: {"head": header(w, generation=w.generation + 1)},
        ("FAILED_PRECONDITION", "STALE_GENERATION"),
    ),
    "step 0": (lambda w: {"head": header(w, step=0)}, BAD_REQUEST),
    "from a future version": (lambda w: {"head": header(w, base_version=10**6)}, IN_FUTURE),
}


@pytest.mark.parametrize(("what", "expected"), BAD_PUSHES.values(), ids=BAD_PUSHES)
def test_bad_push(worker, unharmed, what, expected):
    given = what(worker)
    assert refusal(lambda: push(worker, *given.pop("chunks", [GOOD]), **given)) == expected


def test_a_stream_without_header_commit_or_sense(worker, unharmed):
    head, nothing = header(worker), pb.PushSparseRequest()
    for messages, reason in (
        ([CHUNK], "BAD_REQUEST"),
        ([nothing], "BAD_REQUEST"),
        ([head, CHUNK], "BAD_COMMIT"),
        ([head, head], "BAD_REQUEST"),
        ([head, nothing], "BAD_REQUEST"),
    ):
        assert refusal(lambda m=messages: worker.stub.PushSparse(iter(m), timeout=TIMEOUT))[1] == reason
    assert list(worker.stub.PushSparse(iter([]), timeout=TIMEOUT)) == []


def test_a_stream_cut_in_the_middle(worker, unharmed):
    release = threading.Event()

    def messages():
        yield header(worker)
        yield pb.PushSparseRequest(chunks=[GOOD])
        release.wait(TIMEOUT)

    call = worker.stub.PushSparse(messages(), timeout=TIMEOUT)
    call.cancel()
    release.set()
    assert call.cancelled()


def test_an_older_step_is_out_of_order(worker):
    worker.step = 10
    worker.push([1], [0.0])
    worker.step = 3
    assert refusal(lambda: worker.push([1], [0.0])) == ("FAILED_PRECONDITION", "STEP_OUT_OF_ORDER")


def test_a_pull_from_a_future_version(worker, unharmed):
    request = worker.pull_request(has_base=True, base_version=10**9)
    assert refusal(lambda: worker.stub.PullDiff(iter([request]), timeout=TIMEOUT)) == IN_FUTURE


def layout(shape, **fields):
    return packed(pb.ModelLayout(parameters=[pb.TensorSpec(name="w", shape=shape, data_type=1)]), **fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"protocol_version": 99}, ("UNIMPLEMENTED", "UNKNOWN_PROTOCOL")),
        ({"num_shards": 3}, ("FAILED_PRECONDITION", "SHARD_MISMATCH")),
        ({"layout": layout([N + 1], fingerprint=b"x")}, ("FAILED_PRECONDITION", "FINGERPRINT_MISMATCH")),
        ({"layout": pb.PackedLayout()}, ("FAILED_PRECONDITION", "FINGERPRINT_MISMATCH")),
        ({"layout": layout([2**40, 2**40])}, ("FAILED_PRECONDITION", "FINGERPRINT_MISMATCH")),
        ({"layout": layout([N], fingerprint=b"x")}, BAD_REQUEST),  # a fingerprint that is not the layout's
        ({"loaded": pb.LoadedModel(digest=b"x" * 31)}, BAD_REQUEST),
        ({"loaded": pb.LoadedModel(replaces=True)}, BAD_REQUEST),
    ],
)
def test_bad_join(server, worker, unharmed, fields, expected):
    new = RawWorker(server.addresses[0], "new")
    assert refusal(lambda: worker.stub.Join(new.join_request(**fields), timeout=TIMEOUT)) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("ALREADY_EXISTS", "ALREADY_UPLOADED")),
        ({"digest": b"x" * 33}, BAD_REQUEST),
        ({"generation": 1 << 32}, ("FAILED_PRECONDITION", "STALE_GENERATION")),
    ],
)
def test_an_upload_over_a_living_model(worker, unharmed, fields, expected):
    header = pb.UploadHeader(identity=worker.identity, **{"generation": 0} | fields)
    header.generation += worker.generation
    requests = iter([pb.UploadModelRequest(header=header)])
    assert refusal(lambda: worker.stub.UploadModel(requests, timeout=TIMEOUT)) == expected


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
    assert refusal(lambda: worker.stub.ExchangeBuffers(iter([request]), timeout=TIMEOUT)) == BAD_REQUEST


@pytest.mark.parametrize("rpc", ["Join", "LeaseSamples"])
def test_garbage_instead_of_a_message(worker, unharmed, rpc):
    call = worker.channel.unary_unary(f"/sparseps.v1.ParameterServerService/{rpc}")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"\xff" * 100, timeout=TIMEOUT)
    assert caught.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)


def test_a_message_beyond_the_limit(worker, unharmed):
    too_large = chunk_of([0], [1])
    too_large.values = bytes(5 << 20)
    with pytest.raises(grpc.RpcError) as caught:
        push(worker, too_large)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

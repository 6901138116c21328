"""Names and lists in requests: what is too long, too many or not printable is refused before it is kept or shown."""

import pytest
import torch

import psclient
from psclient.errors import ConfigurationError
from psclient.rpc.local_server import LocalServer
from pscore.model.layout import ModelLayout, TensorSpec
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.packed import packed
from tests.system.raw import TIMEOUT, RawWorker, outcome

F32 = torch.float32
ESCAPE = "\x1b]0;owned\x07"
FORGED = "x\n2030-01-01 00:00:00,000 INFO    all is well"
UNPRINTABLE = [ESCAPE, FORGED, "a\u202eb", "nul\0"]


@pytest.fixture(scope="module")
def server():
    with LocalServer(lease_seconds=120) as running:
        RawWorker(running.addresses[0], "first").join()
        yield running


@pytest.fixture
def empty():
    with LocalServer(lease_seconds=120) as running:
        yield running


def layout(*names, aliases=(), buffers=()):
    specs = (tuple(TensorSpec(name, (1,), F32) for name in kind) for kind in (names, buffers))
    message = pb.ModelLayout(parameters=tensors(names, aliases), buffers=tensors(buffers))
    return packed(message, fingerprint=ModelLayout(*specs).fingerprint)


def tensors(names, aliases=()):
    shape, data_type = [1], pb.DATA_TYPE_FLOAT32
    return [pb.TensorSpec(name=name, shape=shape, data_type=data_type, aliases=aliases) for name in names]


def join(server, found, **fields):
    new = RawWorker(server.addresses[0], "w")
    return refused(new.stub.Join, new.join_request(layout=found, **fields))


def refused(call, request):
    """Return reason and words of a refusal, which must have come whole."""
    _, reason, words = outcome(lambda: call(request, timeout=TIMEOUT))
    assert reason is not None, words
    return reason, words


LONG = "x" * 5000
TOO_MUCH = {
    "a tensor too many": (lambda: packed(*[pb.ModelLayout(parameters=tensors(["t"] * (1 << 16)))] * 17), {}, "1048576"),
    "an alias too many": (
        lambda: packed(*[pb.ModelLayout(parameters=tensors(["w"], ["a"] * (1 << 18)))] * 5),
        {},
        "1048576",
    ),
    "a long tensor name": (lambda: layout(LONG), {}, "512"),
    "a long alias": (lambda: layout("w", aliases=[LONG]), {}, "512"),
    "a long method": (lambda: layout("w"), {"method": "m" * (1 << 20)}, "method"),
    "no method": (lambda: layout("w"), {"method": ""}, "method"),
    "a setting too many": (lambda: layout("w"), {"method_settings": {f"s{i}": "v" for i in range(257)}}, "256"),
    "a long name of a setting": (lambda: layout("w"), {"method_settings": {LONG: "v"}}, "setting"),
    "a long setting": (lambda: layout("w"), {"method_settings": {"s": "v" * (1 << 20)}}, "'s'"),
    "many codecs": (lambda: layout("w"), {"index_codecs": range(1000)}, "64"),
}


@pytest.mark.parametrize("what", TOO_MUCH)
@pytest.mark.parametrize("who", ["empty", "server"])
def test_more_than_a_model_or_a_method_has_is_refused(request, what, who):
    make, fields, named = TOO_MUCH[what]
    reason, words = join(request.getfixturevalue(who), make(), **fields)
    if reason == "FINGERPRINT_MISMATCH":  # compared with the run's model and not read
        assert who == "server"
    else:
        assert reason == "BAD_REQUEST"
        assert named in words
    assert len(words) < 1000


@pytest.mark.parametrize("text", [*UNPRINTABLE, "__metadata__"], ids=ascii)
def test_a_tensor_with_a_name_that_cannot_be_shown_or_filed_is_refused(empty, text):
    for found in (layout(text), layout("w", aliases=[text]), layout("w", buffers=[text])):
        reason, words = join(empty, found)
        assert reason == "BAD_REQUEST"
        assert words.isprintable()


@pytest.mark.parametrize("text", UNPRINTABLE, ids=ascii)
def test_what_cannot_be_shown_is_refused_wherever_a_name_stands(server, text):
    raw, good = RawWorker(server.addresses[0], "w"), layout("w")
    identity = {"worker_id": "w", "incarnation": "i"}
    for rpc, request in (
        ("Join", raw.join_request(method=text, layout=good)),
        ("Join", raw.join_request(method_settings={text: "v"}, layout=good)),
        ("Join", raw.join_request(method_settings={"s": text}, layout=good)),
        ("RenewLease", pb.RenewLeaseRequest(identity=identity | {"run_id": text})),
        ("RenewLease", pb.RenewLeaseRequest(identity=identity | {"worker_id": text})),
        ("Leave", pb.LeaveRequest(identity=identity | {"incarnation": text})),
        ("FinishRun", pb.FinishRunRequest(run_id=text)),
        ("TakeSnapshot", pb.TakeSnapshotRequest(checkpoint=text)),
        ("RestoreModel", pb.RestoreModelRequest(checkpoint=text)),
        ("PinCheckpoint", pb.PinCheckpointRequest(checkpoint=text)),
        ("ReadCheckpoint", pb.ReadCheckpointRequest(checkpoint=text)),
        ("DeleteCheckpoint", pb.DeleteCheckpointRequest(checkpoint=text)),
        ("EvictWorker", pb.EvictWorkerRequest(worker_id=text)),
    ):
        reason, words = refused(getattr(raw.stub, rpc), request)
        assert reason == "BAD_REQUEST", request
        assert words.isprintable()


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_a_worker_is_told_before_anything_is_sent_that_a_name_cannot_be_filed(kind):
    model = torch.nn.Linear(2, 2)
    if kind == "parameter":
        model.register_parameter("__metadata__", torch.nn.Parameter(torch.zeros(2)))
    else:
        model.register_buffer("__metadata__", torch.zeros(2))
    with pytest.raises(ConfigurationError, match="__metadata__"):
        psclient.DGS(model.parameters(), lr=0.1, model=model, server="127.0.0.1:1")


def test_one_tensor_has_no_name_under_which_it_is_taken_for_two():
    one = ModelLayout((TensorSpec("a [1] float32\nparameter\0b", (1,), F32),))
    two = ModelLayout((TensorSpec("a", (1,), F32), TensorSpec("b", (1,), F32)))
    assert one.fingerprint != two.fingerprint

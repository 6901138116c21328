"""Worker and server tell each other at join what they read, and write nothing else; an empty list means the plain."""

import grpc
import pytest

import psclient
from psclient.errors import ConfigurationError, RefusedError
from psclient.rpc import run
from psclient.rpc.local_server import LocalServer
from pscore.version import __version__
from pscore.wire import frames, protocol
from pscore.wire.codecs.names import PLAIN_INDEX_CODECS
from pscore.wire.layouts import pack_layout
from pscore.wire.protocol import NEWEST_PROTOCOL
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from psservice.process.server import Server
from psservice.rpc import workers
from psservice.settings import ServerSettings
from tests.psservice.service_makers import F32, layout_of
from tests.system.tools import QUICK, assert_same_parameters, make_data, make_model, run_of, train_step


@pytest.fixture
def server(monkeypatch):
    """A server of which the test says what it lists; in this process, over loopback all the same."""

    def start(index_codecs, value_codecs):
        monkeypatch.setattr(workers, "READABLE_INDEX_CODECS", index_codecs)
        monkeypatch.setattr(workers, "READABLE_VALUE_CODECS", value_codecs)
        settings = ServerSettings(listen="127.0.0.1:0", health_listen="", metrics_listen="", down_mode="exact")
        running.append(Server(settings))
        return running[0].address

    running = []
    yield start
    for each in running:
        each.stop()


def dgs(model, server, **settings):
    settings = QUICK.model_copy(update=settings)
    return psclient.DGS(model.parameters(), lr=0.1, density=0.1, model=model, server=server, settings=settings)


def pushed(optimizer):
    """The codecs of every chunk that the worker sends from now on."""
    codecs, shard = set(), run_of(optimizer).shards[0]
    send = shard.send
    shard.send = lambda encoded: (
        codecs.update((chunk.index_codec, chunk.value_codec) for chunk, *_ in encoded.chunks),
        send(encoded),
    )
    return codecs


def test_a_server_that_lists_nothing_reads_the_plain_codecs(server):
    address, model = server((), ()), make_model(batch_norm=False)
    with dgs(model, address, value_type="bf16") as optimizer:
        codecs = pushed(optimizer)
        for _ in range(3):
            train_step(model, optimizer, *make_data())
        assert_same_parameters(model, address)
    assert codecs == {(pb.INDEX_CODEC_RAW32, pb.VALUE_CODEC_BF16)}


@pytest.mark.parametrize("setting", [{"value_type": "int8"}, {"index_codec": "rice"}])
def test_what_a_server_that_lists_nothing_cannot_read_is_said(server, setting):
    with pytest.raises(ConfigurationError, match=r"use one of (fp32, fp16, bf16|raw32), or"):
        dgs(make_model(), server((), ()), **setting)


def test_nothing_is_written_that_the_server_does_not_list(server):
    listed = (pb.INDEX_CODEC_DENSE, pb.INDEX_CODEC_RICE)
    address, model = server(listed, (pb.VALUE_CODEC_FP32,)), make_model(batch_norm=False)
    with dgs(model, address) as optimizer:
        codecs = pushed(optimizer)
        for _ in range(3):
            train_step(model, optimizer, *make_data())
        assert codecs == {(pb.INDEX_CODEC_RICE, pb.VALUE_CODEC_FP32)}


def test_a_worker_that_lists_nothing_is_answered_in_the_plain_codecs_or_refused(monkeypatch):
    monkeypatch.setattr(run, "READABLE_INDEX_CODECS", ())
    monkeypatch.setattr(run, "READABLE_VALUE_CODECS", ())
    read, seen = frames.ChunkReader.read, set()
    monkeypatch.setattr(
        frames.ChunkReader,
        "read",
        lambda reader, chunk, *values: (seen.add(chunk.index_codec), read(reader, chunk, *values))[1],
    )
    topk = {"down_mode": "topk", "down_density": 0.1, "down_dense_below": 0}
    with LocalServer(down_value_type="fp16", **topk) as running:
        model = make_model(batch_norm=False)
        with dgs(model, running) as optimizer:
            for _ in range(4):
                train_step(model, optimizer, *make_data())
            assert optimizer.report.reply_mode == "topk"
    assert seen
    assert seen <= PLAIN_INDEX_CODECS
    with LocalServer(down_value_type="int8", **topk) as running, pytest.raises(RefusedError, match="int8"):
        dgs(make_model(), running)


OLDER, NEWER = "the worker is of the older release", "the server is of the older release"


@pytest.fixture
def address(server):
    return server(workers.READABLE_INDEX_CODECS, workers.READABLE_VALUE_CODECS)


def test_a_shard_tells_the_release_of_a_worker(address):
    with dgs(make_model(batch_norm=False), address), grpc.insecure_channel(address) as channel:
        (worker,) = ParameterServerServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=5).workers
        assert worker.release == __version__


def join_speaking(address, oldest, newest):
    request = pb.JoinRequest(
        identity=pb.WorkerIdentity(worker_id="w", incarnation="1"),
        protocol_version=oldest,
        newest_protocol_version=newest,
        method="raw",
        layout=pack_layout(layout_of((3, F32))),
        num_shards=1,
    )
    with grpc.insecure_channel(address) as channel:
        return ParameterServerServiceStub(channel).Join(request, timeout=5)


@pytest.mark.parametrize(
    ("worker", "served", "spoken"),
    [
        ((3, 0), (3, 3), 3),
        ((3, 3), (3, 3), 3),
        ((3, 5), (3, 3), 3),
        ((2, 3), (3, 4), 3),
        ((3, 6), (2, 5), 5),
        ((4, 0), (2, 5), 4),
    ],
)
def test_a_join_agrees_on_the_newest_protocol_that_both_speak(worker, served, spoken, address, monkeypatch):
    monkeypatch.setattr(protocol, "OLDEST_PROTOCOL", served[0])
    monkeypatch.setattr(protocol, "NEWEST_PROTOCOL", served[1])
    assert join_speaking(address, *worker).protocol_version == spoken


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        ((2, 0), f"protocol 2, the server 3 to 4: {OLDER}"),
        ((1, 2), f"1 to 2, the server 3 to 4: {OLDER}"),
        ((5, 0), f"protocol 5, the server 3 to 4: {NEWER}"),
        ((5, 7), f"5 to 7, the server 3 to 4: {NEWER}"),
    ],
)
def test_without_a_protocol_in_common_a_join_is_refused_with_both_ranges_and_the_side_to_upgrade(
    worker, said, address, monkeypatch
):
    monkeypatch.setattr(protocol, "NEWEST_PROTOCOL", 4)
    with pytest.raises(grpc.RpcError) as refused:
        join_speaking(address, *worker)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert said in refused.value.details()
    assert "upgrade the older side" in refused.value.details()


def test_a_range_of_protocols_that_ends_before_it_begins_is_a_bad_request(address):
    with pytest.raises(grpc.RpcError) as refused:
        join_speaking(address, 3, 2)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_worker_refuses_a_server_that_answers_in_a_protocol_which_was_not_offered(address, monkeypatch):
    monkeypatch.setattr(workers, "common_protocol", lambda oldest, newest: newest + 1)
    with pytest.raises(RefusedError, match=f"in protocol {NEWEST_PROTOCOL + 1}, which this"):
        dgs(make_model(batch_norm=False), address)

"""A call that is meant for another shard is refused before a message of it is read."""

import threading

import grpc
import pytest

from pscore.wire.messages import SHARD_HEADER, place_of
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from psservice.process.server import Server, StartError
from psservice.rpc.calls import SERVICE
from psservice.settings import ServerSettings

TIMEOUT = 20.0


@pytest.fixture(scope="module")
def channel():
    place = {"shard_index": 1, "num_shards": 3, "coordinator": "127.0.0.1:1"}
    server = Server(ServerSettings(listen="127.0.0.1:0", health_listen="", metrics_listen="", **place))
    with grpc.insecure_channel(server.address) as channel:
        yield channel
    server.stop()


def test_a_shard_that_follows_nobody_does_not_start():
    with pytest.raises(StartError, match="--coordinator"):
        Server(ServerSettings(listen="127.0.0.1:0", health_listen="", metrics_listen="", shard_index=1, num_shards=3))


@pytest.mark.parametrize("method", [*SERVICE.methods], ids=lambda method: method.name)
@pytest.mark.parametrize("place", ["0 of 3", "1 of 2", "", "x" * 4_000])
def test_every_call_is_refused_before_its_message(channel, method, place):
    call = channel.stream_unary(f"/{SERVICE.full_name}/{method.name}")

    ended = threading.Event()

    def no_message():
        ended.wait(TIMEOUT)
        yield from ()

    refused = call.future(no_message(), timeout=TIMEOUT, metadata=((SHARD_HEADER, place),))
    error = refused.exception(TIMEOUT)
    ended.set()
    assert "it is shard 1 of 3 (SHARD_MISMATCH" in error.details()
    assert len(error.details()) < 300


def test_who_means_this_shard_or_does_not_say_is_heard(channel):
    stub = ParameterServerServiceStub(channel)
    for metadata in (((SHARD_HEADER, place_of(1, 3)),), ()):
        assert stub.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT, metadata=metadata).shard_index == 1

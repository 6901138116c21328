"""A disk that takes no write for a while holds up pushes, and nothing else."""

import threading
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import psclient.rpc.local_server
from psclient.rpc.local_server import LocalServer
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.faults import spawner
from tests.system.raw import TIMEOUT, RawWorker
from tests.system.tools import wait_until


@pytest.fixture
def stalled(tmp_path, monkeypatch):
    """The file while which no write to the journal returns."""
    file = tmp_path / "stalled"
    monkeypatch.setattr(psclient.rpc.local_server, "spawn", spawner("stalled-journal", file))
    yield file
    file.unlink(missing_ok=True)


@pytest.mark.parametrize("fsync", ["interval", "never"])
def test_health_leases_and_other_streams_do_not_wait_for_the_disk(stalled, tmp_path, fsync):
    settings = {"fsync": fsync, "health_listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0"}
    with LocalServer(data_dir=tmp_path / "data", **settings) as server:
        worker, other = RawWorker(server.addresses[0], "w"), RawWorker(server.addresses[0], "other")
        for each in (worker, other):
            each.join()
            each.pull()
        for number in range(8):  # the first few are served by threads in any case
            worker.push([number], [1.0])
        stalled.touch()
        pushing = threading.Thread(target=worker.push, args=([1], [1.0]), daemon=True)
        pushing.start()
        wait_until(stalled.with_suffix(".met").exists)
        with grpc.insecure_channel(server.health_addresses[0]) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with urllib.request.urlopen(f"http://{server.metrics_addresses[0]}/metrics", timeout=TIMEOUT) as answered:
            assert "psservice_durable 1.0" in answered.read().decode()
        other.stub.RenewLease(pb.RenewLeaseRequest(identity=other.identity), timeout=TIMEOUT)
        assert other.stub.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT).version == 8
        assert pushing.is_alive()
        stalled.unlink()
        pushing.join(TIMEOUT)
        assert not pushing.is_alive()
        assert worker.step == 9

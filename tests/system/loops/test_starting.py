"""When a server starts: what it says and heeds meanwhile, what it needs the second time, and when it asks for that."""

import errno
import json
import os
import signal
import subprocess
import sys

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.torch import save_file

import psclient
from psclient.rpc.local_server import LocalServer
from psservice.process.server import Server
from psservice.settings import ServerSettings
from tests.system.raw import RawWorker
from tests.system.tools import QUICK, make_data, make_model, train_step
from verify.cluster.servers import free_ports

STATES = health_pb2.HealthCheckResponse
WAIT_SECONDS = 60


@pytest.fixture
def starting(tmp_path):
    """A server that has opened its health port and now waits for its token file, a pipe that nobody has written to."""
    pipe, health = tmp_path / "tokens", f"127.0.0.1:{free_ports(1)[0]}"
    os.mkfifo(pipe)
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "psservice", "serve", "--listen=127.0.0.1:0", f"--health-listen={health}",
         "--metrics-listen=", f"--tokens={pipe}", f"--ready-fd={write_end}"],
        pass_fds=(write_end,), stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(write_end)
    with grpc.insecure_channel(health) as channel, os.fdopen(read_end) as ready:
        stub = health_pb2_grpc.HealthStub(channel)

        def state(service):
            request = health_pb2.HealthCheckRequest(service=service)
            return stub.Check(request, timeout=WAIT_SECONDS, wait_for_ready=True).status

        yield process, pipe, ready, state
    process.kill()
    process.wait(WAIT_SECONDS)


def test_a_server_is_alive_before_it_serves(starting):
    _, pipe, ready, state = starting
    assert state("liveness") == STATES.SERVING
    assert state("") == STATES.NOT_SERVING
    assert state("sparseps.v1.ParameterServerService") == STATES.NOT_SERVING
    pipe.write_text("worker a-token\n")
    assert json.loads(ready.readline())["health"]
    assert [state(name) for name in ("liveness", "", "sparseps.v1.ParameterServerService")] == [STATES.SERVING] * 3


def test_a_server_that_starts_heeds_sigterm(starting):
    process, _, _, state = starting
    assert state("liveness") == STATES.SERVING
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_SECONDS) == 0


def test_a_shard_with_a_past_of_its_own_does_not_read_what_it_began_with(tmp_path):
    start = tmp_path / "start.safetensors"
    save_file(make_model(5).state_dict(), start)
    options = {"init": start, "data_dir": tmp_path / "data"}
    with LocalServer(**options) as server:
        model = make_model()
        optimizer = psclient.DGS(model.parameters(), lr=0.1, model=model, server=server.server, settings=QUICK)
        train_step(model, optimizer, *make_data())
        optimizer.close()
        before = psclient.download(server.server)
    start.unlink()
    with LocalServer(**options) as server:
        after = psclient.download(server.server)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not torch.equal(after["0.weight"], make_model(5).state_dict()["0.weight"])


def test_a_server_whose_disk_has_failed_asks_for_a_restart(tmp_path, monkeypatch):
    """And one whose disk is full does not: space may be made under a running server."""
    settings = ServerSettings(
        listen="127.0.0.1:0", health_listen="127.0.0.1:0", metrics_listen="", data_dir=tmp_path, fsync="always"
    )
    server = Server(settings)
    try:
        worker = RawWorker(server.address, "w")
        worker.join()
        with grpc.insecure_channel(server.health_address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            def states():
                server.update_health()
                requests = [health_pb2.HealthCheckRequest(service=name) for name in ("liveness", "")]
                return [stub.Check(request, timeout=WAIT_SECONDS).status for request in requests]

            with monkeypatch.context() as full:
                full.setattr(os, "writev", failing(errno.ENOSPC))
                with pytest.raises(grpc.RpcError, match="free space"):
                    worker.push([1], [1.0])
                assert states() == [STATES.SERVING, STATES.NOT_SERVING]
            assert worker.push([1], [1.0]).version == 1
            assert states() == [STATES.SERVING, STATES.SERVING]
            monkeypatch.setattr(os, "fdatasync", failing(errno.EIO))
            with pytest.raises(grpc.RpcError, match="restart"):
                worker.push([1], [1.0])
            assert states() == [STATES.NOT_SERVING, STATES.NOT_SERVING]
    finally:
        monkeypatch.undo()
        server.stop()


def failing(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail

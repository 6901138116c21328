"""A shard whose update failed half-way stops and recovers; it never serves on."""

import contextlib

import grpc
import numpy as np
import pytest
import torch

import psclient
import psclient.rpc.local_server
from psclient.errors import ConfigurationError
from psclient.rpc.local_server import LocalServer
from pscore.model.layout import ModelLayout, TensorSpec
from pscore.wire.layouts import pack_layout
from pscore.wire.protocol import NEWEST_PROTOCOL
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.faults import spawner
from tests.system.raw import TIMEOUT, RawWorker
from tests.system.tools import wait_until

SIZES = (5, 7)
FAILED = 70
LAYOUT = pack_layout(ModelLayout(tuple(TensorSpec(f"t{i}", (size,), torch.float32) for i, size in enumerate(SIZES))))


class Worker(RawWorker):
    """Two tensors, and SGD with a rate of 1 on the server."""

    def __init__(self, address):
        super().__init__(address, "w", sum(SIZES))

    def join(self):
        request = pb.JoinRequest(
            identity=self.identity,
            protocol_version=NEWEST_PROTOCOL,
            method="raw",
            method_settings={"update": "torch", "optimizer": '{"name": "SGD", "options": {"lr": 1.0}}'},
            layout=LAYOUT,
            num_shards=1,
        )
        answer = self.stub.Join(request, timeout=TIMEOUT)
        self.identity.run_id, self.generation = answer.run_id, answer.generation
        if answer.state == pb.JOIN_STATE_UPLOAD:
            self.upload()

    def push_all(self, value):
        return self.push(range(self.size), [value] * self.size)


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """The file whose existence breaks an update half-way."""
    file = tmp_path / "broken"
    monkeypatch.setattr(psclient.rpc.local_server, "spawn", spawner("half-step", file))
    return file


@contextlib.contextmanager
def failing(**settings):
    with LocalServer(**settings) as server:
        worker = Worker(server.addresses[0])
        worker.join()
        worker.pull()
        yield server, worker


def model(server):
    return np.concatenate([value.numpy() for _, value in sorted(psclient.download(server.server).items())])


@pytest.mark.parametrize("fsync", ["always", "interval"])
def test_an_update_that_fails_half_way_ends_the_process_and_its_record_is_applied_whole(broken, tmp_path, fsync):
    with failing(data_dir=tmp_path / "data", fsync=fsync) as (server, worker):
        assert worker.push_all(1.0).version == 1
        broken.touch()
        with pytest.raises(grpc.RpcError) as refused:
            worker.push_all(2.0)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        step = worker.step
        with pytest.raises(grpc.RpcError) as later:
            worker.push_all(4.0)
        gone = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED  # refused, or cut as the port closes
        assert later.value.code() in gone, "nothing is served on half a step"
        assert server.processes[0].wait(TIMEOUT) == FAILED
        broken.unlink()
        server.restart()
        assert np.array_equal(model(server), np.full(sum(SIZES), -3.0, np.float32))
        worker.step = step - 1
        wait_until(lambda: grpc.channel_ready_future(worker.channel).result(TIMEOUT) is None)
        again = worker.push_all(2.0)
        assert (again.version, again.repeated_push) == (2, True)
        assert np.array_equal(model(server), np.full(sum(SIZES), -3.0, np.float32))


def test_where_the_record_fails_again_the_server_does_not_start_and_says_why(broken, tmp_path):
    log = tmp_path / "log"
    with log.open("w") as log_to, failing(data_dir=tmp_path / "data", log_to=log_to) as (server, worker):
        worker.push_all(1.0)
        broken.touch()
        with pytest.raises(grpc.RpcError):
            worker.push_all(2.0)
        assert server.processes[0].wait(TIMEOUT) == FAILED
        assert log.read_text().count("Traceback") <= 1
        with pytest.raises(ConfigurationError, match="status 1"):
            server.restart()
        assert "cannot be applied" in log.read_text()
        broken.unlink()
        server.restart()
        assert np.array_equal(model(server), np.full(sum(SIZES), -3.0, np.float32))


def test_a_record_that_fails_each_time_is_named_and_last_good_goes_back_to_the_version_before(tmp_path, monkeypatch):
    poisoned, log = tmp_path / "poisoned", tmp_path / "log"
    monkeypatch.setattr(psclient.rpc.local_server, "spawn", spawner("poison", poisoned))
    poisoned.touch()
    with log.open("w") as log_to, failing(data_dir=tmp_path / "data", log_to=log_to) as (server, worker):
        worker.push_all(1.0)
        with pytest.raises(grpc.RpcError):
            worker.push_all(2.0)
        assert server.processes[0].wait(TIMEOUT) == FAILED
        said = log.read_text()
        with pytest.raises(ConfigurationError, match="status 1"):
            server.restart()
        said = log.read_text().removeprefix(said)
        assert "Traceback" not in said
        assert "cannot be applied: TypeError" in said
        assert "--recover last-good" in said
        server._settings["recover"] = "last-good"
        server.restart()
        assert np.array_equal(model(server), np.full(sum(SIZES), -1.0, np.float32)), "nothing of half a step"
        again = Worker(server.addresses[0])
        again.identity.worker_id = "again"
        again.join()
        again.pull()
        assert again.push_all(4.0).version == 2
        server._settings["recover"] = "strict"
        server.processes[0].kill()
        server.restart()
        assert np.array_equal(model(server), np.full(sum(SIZES), -5.0, np.float32))


def test_without_a_data_directory_it_ends_likewise_and_the_worker_uploads_again(broken):
    with failing() as (server, worker):
        worker.push_all(1.0)
        broken.touch()
        with pytest.raises(grpc.RpcError):
            worker.push_all(2.0)
        assert server.processes[0].wait(TIMEOUT) == FAILED
        broken.unlink()
        server.restart()
        again = Worker(server.addresses[0])
        again.join()
        assert np.array_equal(model(server), np.zeros(sum(SIZES), np.float32))


def test_an_error_of_a_gpu_that_a_snapshot_meets_ends_the_process_too(tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    monkeypatch.setattr(psclient.rpc.local_server, "spawn", spawner("device", broken))
    with failing(data_dir=tmp_path / "data", snapshot_seconds=3) as (server, worker):
        worker.push_all(1.0)
        broken.touch()
        assert server.processes[0].wait(TIMEOUT) == FAILED
        broken.unlink()
        server.restart()
        assert np.array_equal(model(server), np.full(sum(SIZES), -1.0, np.float32))


def test_an_error_of_a_gpu_that_a_pull_meets_ends_the_process_too(tmp_path, monkeypatch):
    """Every later call would meet the error, and none of them would reach the apply thread."""
    broken = tmp_path / "broken"
    monkeypatch.setattr(psclient.rpc.local_server, "spawn", spawner("device", broken))
    with failing(data_dir=tmp_path / "data") as (server, worker):
        worker.push_all(1.0)
        broken.touch()
        worker.has_base = False
        with pytest.raises(grpc.RpcError) as refused:
            worker.pull()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.processes[0].wait(TIMEOUT) == FAILED
        broken.unlink()
        server.restart()
        assert np.array_equal(model(server), np.full(sum(SIZES), -1.0, np.float32))

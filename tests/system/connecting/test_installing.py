"""While a model's first snapshot is written, others are answered, however slow the disk; a crash is before or after."""

import contextlib
import signal
import threading

import grpc
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import psclient
import psclient.rpc.local_server
from psclient.rpc.local_server import LocalServer
from pscore.model.layout import ModelLayout, TensorSpec
from pscore.wire.layouts import pack_layout
from pscore.wire.protocol import NEWEST_PROTOCOL
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.faults import spawner
from tests.system.raw import TIMEOUT, N, RawWorker
from tests.system.tools import wait_until

LAYOUT = pack_layout(ModelLayout((TensorSpec("w", (N,), torch.float32),)))


@pytest.fixture
def slow(tmp_path, monkeypatch):
    """The file whose existence keeps snapshots from getting to the disk."""
    file = tmp_path / "slow"
    monkeypatch.setattr(psclient.rpc.local_server, "spawn", spawner("slow-snapshots", file))
    yield file
    file.unlink(missing_ok=True)


@pytest.fixture
def options(tmp_path):
    return {"data_dir": tmp_path / "data", "snapshot_seconds": 3600, "lease_seconds": 60}


@contextlib.contextmanager
def meanwhile(slow, call):
    """Have a call wait for the disk; it is done at the end of the block."""
    outcome = []

    def run():
        try:
            outcome.append(call())
        except grpc.RpcError as error:
            outcome.append(error)

    slow.with_suffix(".met").unlink(missing_ok=True)
    slow.touch()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield outcome
    finally:
        slow.unlink(missing_ok=True)
        thread.join(TIMEOUT)
    assert len(outcome) == 1


def joins(worker):
    """How a worker's attempt to join is answered; it uploads nothing."""
    request = pb.JoinRequest(
        identity=worker.identity, protocol_version=NEWEST_PROTOCOL, method="raw", layout=LAYOUT, num_shards=1
    )
    answer = worker.stub.Join(request, timeout=TIMEOUT)
    worker.identity.run_id, worker.generation = answer.run_id, answer.generation
    return answer.state


class Worker(RawWorker):
    def __init__(self, address, name):
        super().__init__(address, name)
        self.address = address

    def renew(self):
        return self.stub.RenewLease(pb.RenewLeaseRequest(identity=self.identity), timeout=TIMEOUT)

    def status(self):
        return self.stub.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT)


def assert_others_are_answered(known, slow, outcome):
    """Renewals and status as ever; who joins is told to wait."""
    wait_until(slow.with_suffix(".met").exists)
    other = Worker(known.address, "other")
    assert joins(other) == pb.JOIN_STATE_WAIT
    assert other.renew().live_workers >= 1
    assert known.status().shard_index == 0
    assert slow.exists()
    assert not outcome, "the call waits for the disk all the time"
    return other


def test_others_are_answered_while_an_upload_is_written(slow, options):
    with LocalServer(**options) as server:
        worker = Worker(server.addresses[0], "w")
        assert joins(worker) == pb.JOIN_STATE_UPLOAD
        with meanwhile(slow, worker.upload) as outcome:
            other = assert_others_are_answered(worker, slow, outcome)
            assert worker.renew().live_workers == 2
        assert joins(other) == pb.JOIN_STATE_READY
        assert other.generation == worker.generation


def test_others_are_answered_while_an_init_model_is_written(slow, options, tmp_path):
    model = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(float(N))}, model)
    with LocalServer(**options, init=model) as server:
        worker = Worker(server.addresses[0], "w")
        with meanwhile(slow, lambda: joins(worker)) as outcome:
            other = assert_others_are_answered(worker, slow, outcome)
        assert outcome == [pb.JOIN_STATE_READY]
        assert joins(other) == pb.JOIN_STATE_READY
        assert torch.equal(psclient.download(server.server)["w"], torch.arange(float(N)))


def trained(server, name="w"):
    worker = Worker(server.addresses[0], name)
    worker.join()
    worker.pull()
    for value in (1.0, 2.0):
        worker.push([3], [value])
        worker.pull()
    return worker


def going_back(worker):
    return lambda: worker.stub.RestoreModel(pb.RestoreModelRequest(version=1), timeout=2 * TIMEOUT)


def test_others_are_answered_while_a_rollback_is_written_and_pushes_come_again_later(slow, options):
    with LocalServer(**options) as server:
        worker = trained(server)
        with meanwhile(slow, going_back(worker)) as outcome:
            assert_others_are_answered(worker, slow, outcome)
            assert worker.renew().live_workers == 2
            with pytest.raises(grpc.RpcError) as refused:
                worker.push([3], [4.0])
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            worker.pull()  # of the model that is served still
            assert slow.exists()
        assert outcome[0].version == 1
        with pytest.raises(grpc.RpcError) as refused:
            worker.push([3], [4.0])
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert joins(worker) == pb.JOIN_STATE_READY
        worker.version = 1
        assert worker.push([3], [8.0]).version == 2
        assert psclient.download(server.server)["w"][3] == -9.0


def restarted(server):
    server.processes[0].send_signal(signal.SIGKILL)
    server.processes[0].wait(TIMEOUT)


def test_a_server_killed_while_a_rollback_is_written_is_where_it_was_before(slow, options):
    with LocalServer(**options) as server:
        worker = trained(server)
        with meanwhile(slow, going_back(worker)) as outcome:
            other = assert_others_are_answered(worker, slow, outcome)
            restarted(server)
        server.restart()
        assert psclient.download(server.server)["w"][3] == -3.0
        wait_until(lambda: grpc.channel_ready_future(other.channel).result(TIMEOUT) is None)
        assert other.renew().live_workers == 2, "a lease that began meanwhile is kept"
        worker.step -= 1
        wait_until(lambda: grpc.channel_ready_future(worker.channel).result(TIMEOUT) is None)
        worker.version = 1
        assert worker.push([3], [2.0]).repeated_push


def test_a_server_killed_while_an_upload_is_written_begins_without_a_model(slow, options):
    with LocalServer(**options) as server:
        worker = Worker(server.addresses[0], "w")
        assert joins(worker) == pb.JOIN_STATE_UPLOAD
        with meanwhile(slow, worker.upload) as outcome:
            assert_others_are_answered(worker, slow, outcome)
            restarted(server)
        server.restart()
        again = Worker(server.addresses[0], "again")
        again.theta = np.full(N, 5.0, np.float32)
        assert joins(again) == pb.JOIN_STATE_UPLOAD
        again.upload()
        assert torch.equal(psclient.download(server.server)["w"], torch.full((N,), 5.0))


def test_a_rollback_holds_where_old_snapshots_cannot_be_looked_for_behind_it(options, tmp_path, monkeypatch):
    file = tmp_path / "fault"
    monkeypatch.setattr(psclient.rpc.local_server, "spawn", spawner("no-listing", file))
    with LocalServer(**options) as server:
        worker = trained(server)
        file.touch()
        assert going_back(worker)().version == 1
        assert joins(worker) == pb.JOIN_STATE_READY
        worker.version = 1
        assert worker.push([3], [8.0]).version == 2
        restarted(server)
        file.unlink()
        server.restart()
        assert psclient.download(server.server)["w"][3] == -9.0

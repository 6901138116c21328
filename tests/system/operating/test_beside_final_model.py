"""While the final model of a run is written, operators are answered, however many workers report the run's end."""

import grpc
import pytest

import psclient.rpc.local_server
from psclient.rpc.local_server import LocalServer
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from tests.faults import spawner
from tests.system.raw import TIMEOUT, RawWorker
from tests.system.tools import wait_until

WORKERS = 12  # more than the server has threads for operators


@pytest.fixture
def held(tmp_path, monkeypatch):
    file = tmp_path / "held"
    monkeypatch.setattr(psclient.rpc.local_server, "spawn", spawner("held-model", file))
    return file


def test_operators_are_answered_while_many_workers_wait_for_the_final_model(held, tmp_path):
    final = tmp_path / "final.safetensors"
    with LocalServer(final_model=final) as server, grpc.insecure_channel(server.addresses[0]) as channel:
        worker = RawWorker(server.addresses[0], "w0")
        worker.join()
        held.touch()
        stub = ParameterServerServiceStub(channel)
        calls = [stub.FinishRun.future(pb.FinishRunRequest(), timeout=10 * TIMEOUT) for _ in range(WORKERS)]
        wait_until(lambda: held.with_suffix(".met").exists())
        for _ in range(WORKERS):  # so that all calls above are with the server
            assert stub.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT).run_state == pb.RUN_STATE_FINISHED
        assert stub.Drain(pb.DrainRequest(action=pb.DRAIN_ACTION_CLOSE), timeout=TIMEOUT).draining
        assert not final.exists()
        held.unlink()
        assert [call.result().final_model for call in calls] == [str(final)] * WORKERS

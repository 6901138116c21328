"""A shard other than 0 belongs to the run of the model that it has taken; a run that is only named is none."""

import uuid
from contextlib import suppress

import grpc
import pytest

import psclient
from psclient.rpc.local_server import LocalServer
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from tests.system.tools import QUICK, make_data, make_model, train_step

TIMEOUT = 20.0


def name_another_run(address):
    """Name a run of one's own in every kind of call that needs no model, and begin an upload."""
    identity = pb.WorkerIdentity(run_id="evil", worker_id=f"liar-{uuid.uuid4()}", incarnation="1")
    header = pb.UploadHeader(identity=identity, generation=7 << 32)
    with grpc.insecure_channel(address) as channel:
        stub = ParameterServerServiceStub(channel)
        for call in (
            lambda: stub.RenewLease(pb.RenewLeaseRequest(identity=identity), timeout=TIMEOUT),
            lambda: stub.Leave(pb.LeaveRequest(identity=identity), timeout=TIMEOUT),
            lambda: stub.FinishRun(pb.FinishRunRequest(run_id="evil"), timeout=TIMEOUT),
            lambda: list(stub.PullDiff(iter([pb.PullDiffRequest(identity=identity)]), timeout=TIMEOUT)),
            lambda: stub.UploadModel(iter([pb.UploadModelRequest(header=header)]), timeout=TIMEOUT),
        ):
            with suppress(grpc.RpcError):
                call()
        return stub.GetStatus(pb.GetStatusRequest(brief=True), timeout=TIMEOUT).run_id


@pytest.mark.parametrize("start", ["upload", "init"])
def test_a_run_that_is_only_named_is_not_taken(tmp_path, start):
    model = make_model()
    options = {}
    if start == "init":
        from safetensors.torch import save_file

        save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, tmp_path / "m.safetensors")
        options["init"] = str(tmp_path / "m.safetensors")
    with LocalServer(shards=2, **options) as server:
        assert name_another_run(server.addresses[1]) != "evil"
        optimizer = psclient.DGS(model.parameters(), lr=0.1, model=model, server=server, settings=QUICK)
        for _ in range(3):
            train_step(model, optimizer, *make_data())
        found = []
        for address in server.addresses:
            with grpc.insecure_channel(address) as channel:
                status = ParameterServerServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT)
                found.append((status.run_id, status.version))
        assert found[0] == found[1]
        assert found[0][1] == 3
        optimizer.close()

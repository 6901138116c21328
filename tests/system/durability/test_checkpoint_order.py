"""The other shards take part in shard 0's checkpoints, in their order and in each once."""

import json
import zlib

import grpc
import pytest
import torch

from psclient.rpc.local_server import LocalServer
from pscore.model.layout import ModelLayout, TensorSpec
from pscore.wire.layouts import pack_layout
from pscore.wire.protocol import NEWEST_PROTOCOL
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from tests.system.operating.asking import metric
from tests.system.tools import wait_until

TIMEOUT, HALF = 20.0, 50
LAYOUT = pack_layout(ModelLayout((TensorSpec("w", (2 * HALF,), torch.float32),)))
ADMIN, WORKER = "admin-9f51a2c7e0", "worker-4471b0ce31"


class Run:
    """Two shards with a model, and a worker that carries what the test says."""

    def __init__(self, server, token=""):
        self.server, self.token = server, token
        self.wait_until_followed()
        self.identity = pb.WorkerIdentity(worker_id="w", incarnation="1")
        answer = self.join(0)
        self.identity.run_id = answer.run_id
        self.upload(0, answer.generation)
        self.join(1)
        self.upload(1, answer.generation)

    def call(self, index, name, request, token=None):
        metadata = [("authorization", f"Bearer {token or self.token}")] if self.token else []
        with grpc.insecure_channel(self.server.addresses[index]) as channel:
            call = getattr(ParameterServerServiceStub(channel), name)
            return call(request, timeout=TIMEOUT, metadata=metadata, wait_for_ready=True)

    def join(self, index):
        request = pb.JoinRequest(
            identity=self.identity,
            protocol_version=NEWEST_PROTOCOL,
            method="raw",
            layout=LAYOUT,
            shard_index=index,
            num_shards=2,
        )
        return self.call(index, "Join", request)

    def upload(self, index, generation):
        values = bytes(4 * HALF)
        chunk = pb.Chunk(
            start=index * HALF,
            length=HALF,
            count=HALF,
            index_codec=pb.INDEX_CODEC_DENSE,
            value_codec=pb.VALUE_CODEC_FP32,
            values=values,
        )
        header = pb.UploadHeader(identity=self.identity, generation=generation)
        messages = [
            pb.UploadModelRequest(header=header),
            pb.UploadModelRequest(chunk=chunk),
            pb.UploadModelRequest(commit=pb.Commit(chunks=1, entries=HALF, crc32=zlib.crc32(values))),
        ]
        self.call(index, "UploadModel", iter(messages))

    def wait_until_followed(self):
        wait_until(lambda: metric(self.server.metrics_addresses[1], "psservice_follows_coordinator") == 1)

    def snapshot(self, index=0, name=""):
        return self.call(index, "TakeSnapshot", pb.TakeSnapshotRequest(checkpoint=name), token=ADMIN).checkpoint

    def newest(self, index=1):
        return self.call(index, "GetStatus", pb.GetStatusRequest()).snapshot_checkpoint


def kept(directory, index=1):
    """The checkpoints that a shard keeps, oldest first."""
    manifests = (directory / f"shard-{index}-of-2" / "snapshots").glob("[0-9]*/manifest.json")
    return [json.loads(path.read_text())["checkpoint"] for path in sorted(manifests)]


@pytest.fixture
def options(tmp_path):
    return {"shards": 2, "data_dir": tmp_path / "data", "snapshot_seconds": 3600, "lease_seconds": 600}


@pytest.fixture
def secured(options, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"admin {ADMIN}\nworker {WORKER}\n")
    return {**options, "tokens": tokens}


def test_a_shard_takes_part_in_each_checkpoint_of_shard_0_once_and_in_their_order(options):
    with LocalServer(**options, keep_snapshots=10) as server:
        run = Run(server)
        drawn = []
        for _ in range(3):
            drawn.append(run.snapshot())
            wait_until(lambda: run.newest() == drawn[-1])
        assert kept(options["data_dir"]) == ["", *drawn]


def test_a_shard_that_was_away_takes_no_part_in_what_was_taken_meanwhile_and_in_the_next(options):
    with LocalServer(**options, keep_snapshots=10) as server:
        run = Run(server)
        first = run.snapshot()
        wait_until(lambda: run.newest() == first)
        server.processes[1].kill()
        run.snapshot()
        server.restart(1)
        run.join(1)
        run.wait_until_followed()
        third = run.snapshot()
        wait_until(lambda: run.newest() == third)
        assert kept(options["data_dir"]) == ["", first, third]


def test_a_shard_goes_on_while_shard_0_is_away_and_follows_it_again(options):
    with LocalServer(**options, keep_snapshots=10) as server:
        run = Run(server)
        server.processes[0].kill()
        run.snapshot(1, "alone")
        wait_until(lambda: metric(server.metrics_addresses[1], "psservice_follows_coordinator") == 0)
        server.restart(0)
        run.join(0)
        run.wait_until_followed()
        drawn = run.snapshot()
        wait_until(lambda: run.newest() == drawn)
        assert kept(options["data_dir"]) == ["", "alone", drawn]


def test_what_an_operator_has_taken_everywhere_is_not_taken_again(options):
    with LocalServer(**options) as server:
        run = Run(server)
        first = run.snapshot()
        wait_until(lambda: run.newest() == first)
        before = kept(options["data_dir"])
        run.snapshot(0, "named")
        second = run.snapshot()
        wait_until(lambda: run.newest() == second)
        assert kept(options["data_dir"]) == [*before, second]


def test_shards_show_one_another_a_proof_of_an_admins_token(secured):
    with LocalServer(**secured) as server:
        run = Run(server, WORKER)
        first = run.snapshot()
        wait_until(lambda: run.newest() == first)


@pytest.mark.parametrize("shown", ["", "Shard ", "Shard " + "0" * 64, "Shard é", f"Shard {ADMIN}"])
def test_nobody_else_is_taken_for_a_shard(shown, secured):
    with LocalServer(**secured | {"shards": 1}) as server, grpc.insecure_channel(server.addresses[0]) as channel:
        request = pb.FollowRunRequest(num_shards=1)
        metadata = [("authorization", shown.encode().decode("latin-1"))] if shown else []
        with pytest.raises((grpc.RpcError, ValueError)) as refused:
            ParameterServerServiceStub(channel).FollowRun(request, timeout=TIMEOUT, metadata=metadata)
        if isinstance(refused.value, grpc.RpcError):
            assert refused.value.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL)

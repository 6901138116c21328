"""A follower shard takes part in shard 0's checkpoints, in their order and in each once, whatever workers carry."""

import json
import signal
import time
import zlib

import grpc
import pytest
import torch

from psclient.rpc.local_server import LocalServer
from pscore.model.layout import ModelLayout, TensorSpec
from pscore.wire.messages import layout_to_message
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from tests.system.tools import wait_until

TIMEOUT, HALF = 20.0, 50
LAYOUT = layout_to_message(ModelLayout((TensorSpec("w", (2 * HALF,), torch.float32),)))
ADMIN, WORKER = "admin-9f51a2c7e0", "worker-4471b0ce31"


class Run:
    """Two shards with a model, and a worker that carries what the test says."""

    def __init__(self, server, token=""):
        self.server, self.token = server, token
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
            identity=self.identity, protocol_version=2, method="raw", layout=LAYOUT, shard_index=index, num_shards=2
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

    def snapshot(self, index=0, name=""):
        return self.call(index, "TakeSnapshot", pb.TakeSnapshotRequest(checkpoint=name), token=ADMIN).checkpoint

    def carry(self, checkpoint, index=1):
        """Renew a lease with a checkpoint; return what the shard tells in turn."""
        request = pb.RenewLeaseRequest(identity=self.identity, checkpoint=checkpoint)
        return self.call(index, "RenewLease", request).checkpoint

    def newest(self, index=1):
        return self.call(index, "GetStatus", pb.GetStatusRequest()).snapshot_checkpoint

    def admits(self, index, token):
        """Whether a shard knows a token, in the file that it reads again every so often."""
        try:
            self.call(index, "GetStatus", pb.GetStatusRequest(), token=token)
        except grpc.RpcError as error:
            return error.code() is not grpc.StatusCode.UNAUTHENTICATED
        return True

    def draw(self):
        """Have shard 0 take a checkpoint; return its id, and what it tells workers."""
        return self.snapshot(), self.carry("", 0)


def kept(directory, index=1):
    """The checkpoints that a shard keeps, oldest first."""
    manifests = (directory / f"shard-{index}-of-2" / "snapshots").glob("[0-9]*/manifest.json")
    return [json.loads(path.read_text())["checkpoint"] for path in sorted(manifests)]


def carries_for_a_while(run, *told):
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        for each in told:
            run.carry(each)


@pytest.fixture
def options(tmp_path):
    return {"shards": 2, "data_dir": tmp_path / "data", "snapshot_seconds": 3600, "lease_seconds": 600}


@pytest.fixture
def secured(options, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"admin {ADMIN}\nworker {WORKER}\n")
    return {**options, "tokens": tokens}


def test_checkpoints_do_not_flip_back_where_workers_carry_old_and_new_ones_by_turns(options):
    with LocalServer(**options, keep_snapshots=10) as server:
        run = Run(server)
        first, told_first = run.draw()
        run.carry(told_first)
        wait_until(lambda: run.newest() == first)
        second, told_second = run.draw()
        run.carry(told_second)
        wait_until(lambda: run.newest() == second)
        carries_for_a_while(run, told_first, told_second)
        third, told_third = run.draw()
        run.carry(told_third)
        wait_until(lambda: run.newest() == third)
        assert kept(options["data_dir"]) == ["", first, second, third]


def test_a_restart_forgets_neither_the_order_nor_what_was_taken(options):
    with LocalServer(**options, keep_snapshots=2) as server:
        run = Run(server)
        drawn = [run.draw() for _ in range(2)]
        run.carry(drawn[1][1])
        wait_until(lambda: run.newest() == drawn[1][0])
        for _ in range(2):  # what was told is no longer among what is kept
            run.snapshot(1)
        for process in server.processes:
            process.send_signal(signal.SIGKILL)
        for index in range(2):
            server.restart(index)
        before = kept(options["data_dir"])
        carries_for_a_while(run, drawn[0][1], drawn[1][1])
        assert kept(options["data_dir"]) == before == ["", ""]
        third, told_third = run.draw()
        run.carry(told_third)
        wait_until(lambda: run.newest() == third)


def test_what_an_operator_has_taken_everywhere_is_not_taken_again_for_workers(options):
    with LocalServer(**options) as server:
        run = Run(server)
        first, told = run.draw()
        run.snapshot(1, first)
        carries_for_a_while(run, told)
        assert kept(options["data_dir"]) == ["", first]


def test_a_worker_cannot_make_a_checkpoint_and_prunes_none(secured):
    with LocalServer(**secured, keep_snapshots=3) as server:
        run = Run(server, WORKER)
        first, told = run.draw()
        head, _, number = first.rpartition("-")
        ahead = f"{head}-{int(number, 16) + 5:x}"
        proof = told.removeprefix(first)
        invented = ["invented", first, ahead, ahead + proof, f"{first}.{'0' * 32}", f"{first}.é"]
        carries_for_a_while(run, *invented)
        assert kept(secured["data_dir"]) == [""]
        run.carry(told)
        wait_until(lambda: run.newest() == first)
        assert kept(secured["data_dir"]) == ["", first]


def test_without_an_admins_token_no_checkpoint_can_be_proved_and_none_is_told(secured):
    with LocalServer(**secured) as server:
        run = Run(server, WORKER)
        first, told = run.draw()
        secured["tokens"].write_text(f"worker {WORKER}\n")
        wait_until(lambda: not any(run.admits(index, ADMIN) for index in range(2)))
        assert run.carry("", 0) == ""
        carries_for_a_while(run, first, told)
        assert kept(secured["data_dir"]) == [""]

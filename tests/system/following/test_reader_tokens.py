"""A reader's token is enough to follow, and allows nothing that changes the run, or what others read of it."""

import grpc
import pytest

import psclient
from psclient import LocalServer, errors
from psclient.settings import ClientSettings
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from tests.system.following.following_tools import SECONDS, parameters_of, same, training
from tests.system.tools import QUICK, make_model, wait_until

TOKENS = {"reader": "r" * 32, "worker": "w" * 32, "admin": "a" * 32}
TIMEOUT = 20.0


def settings_of(role):
    return QUICK.model_copy(update={"token": ClientSettings(token=TOKENS[role]).token})


@pytest.fixture
def server(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("".join(f"{role} {token}\n" for role, token in TOKENS.items()))
    file.chmod(0o600)
    with LocalServer(shards=2, tokens=file, cut_seconds=0.01) as running:
        yield running


def test_a_reader_follows_and_an_unknown_token_does_not(server):
    module = make_model(1)
    with training(server, settings=settings_of("worker")) as run:
        version = run.steps(3)
        with psclient.follow(server, module, settings=settings_of("reader")) as follower:
            follower.wait_for(version, SECONDS)
            assert same(parameters_of(module), run.versions[version])
        stranger = QUICK.model_copy(update={"token": ClientSettings(token="x" * 32).token})
        with psclient.follow(server, make_model(2), settings=stranger) as follower:
            wait_until(lambda: isinstance(follower.error, errors.AccessError), SECONDS)
            assert not follower.ready


def called(address, role, name, request, *, streams=False):
    metadata = (("authorization", f"Bearer {TOKENS[role]}"),)
    with grpc.insecure_channel(address) as channel:
        stub = getattr(ParameterServerServiceStub(channel), name)
        try:
            answer = stub(iter([request]) if streams else request, timeout=TIMEOUT, metadata=metadata)
            if streams:
                next(answer)
        except grpc.RpcError as error:
            return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def test_a_reader_may_do_nothing_else(server):
    with training(server, settings=settings_of("worker")) as run:
        run.steps()
        address = server.addresses[0]
        denied = grpc.StatusCode.PERMISSION_DENIED
        assert called(address, "reader", "Join", pb.JoinRequest())[0] is denied
        assert called(address, "reader", "PushSparse", pb.PushSparseRequest(), streams=True)[0] is denied
        assert called(address, "reader", "PullDiff", pb.PullDiffRequest(), streams=True)[0] is denied
        assert called(address, "reader", "RestoreModel", pb.RestoreModelRequest(version=0))[0] is denied


@pytest.mark.parametrize("role", ["reader", "worker"])
def test_nobody_but_a_shard_tells_of_a_part_of_a_cut(server, role):
    module = make_model(1)
    with training(server, settings=settings_of("worker")) as run:
        run.steps()
        with psclient.follow(server, module, settings=settings_of("reader")) as follower:
            follower.wait_for(1, SECONDS)
            forged = pb.ShardVersion(generation=1, version=99, digest=bytes(16))
            request = pb.FollowRunRequest(shard_index=1, num_shards=2, cut=1, version=forged)
            code, words = called(server.addresses[0], role, "FollowRun", request)
            assert code is grpc.StatusCode.PERMISSION_DENIED
            assert "only shards" in words
            for shard_index, digest in ((0, bytes(16)), (2, bytes(16)), (1, bytes(15))):
                bad = pb.ShardVersion(generation=1, version=1, digest=digest)
                request = pb.FollowRunRequest(shard_index=shard_index, num_shards=2, cut=1, version=bad)
                assert called(server.addresses[0], "admin", "FollowRun", request)[0] is grpc.StatusCode.INVALID_ARGUMENT
            version = run.steps(3)
            follower.wait_for(version, SECONDS)
            wait_until(lambda: same(parameters_of(module), run.versions[version]), SECONDS)

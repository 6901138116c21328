"""Checkpoints that an operator has named: kept until deleted, listed, gone back to, and never taken for another."""

import json
import shutil

import pytest
import torch

import psclient
from psclient.rpc.local_server import LocalServer
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.cli import main as cli
from psservice.ctl.client import call
from tests.system.tools import QUICK, assert_same_parameters, make_data, make_model, train_step

KEPT = 2


@pytest.fixture
def shards(tmp_path):
    """Two shards that keep two snapshots each, a worker of theirs, and commands for them."""
    with LocalServer(shards=2, data_dir=tmp_path, keep_snapshots=KEPT) as server:
        model = make_model(batch_norm=False)
        optimizer = psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server.server, settings=QUICK)

        def train(steps=1):
            for _ in range(steps):
                train_step(model, optimizer, *make_data())

        train()
        yield server, model, optimizer, train
        optimizer.close()


def run(capsys, *words):
    capsys.readouterr()
    code = cli.main([*words])
    return code, capsys.readouterr()


def listed(capsys, server):
    code, printed = run(capsys, "checkpoint", "list", server.server, "--output=json")
    assert code == 0
    return {each["checkpoint"]: each for each in json.loads(printed.out)["checkpoints"] if each["checkpoint"]}


@pytest.mark.long
def test_a_named_checkpoint_outlives_all_that_come_after_it(shards, capsys):
    server, model, optimizer, train = shards
    train(2)
    before = [parameter.clone() for parameter in model.parameters()]
    assert run(capsys, "checkpoint", "create", server.server, "--name", "before the cut")[0] == 0
    for _ in range(KEPT + 2):
        train()
        assert run(capsys, "checkpoint", "create", server.server)[0] == 0
    found = listed(capsys, server)
    assert len(found) == KEPT + 1
    assert found["before the cut"]["named"]
    assert found["before the cut"]["versions"] == {"0": 3, "1": 3}
    code, printed = run(capsys, "checkpoint", "list", *reversed(server.addresses))
    assert code == 0
    assert "before the cut" in printed.out
    assert run(capsys, "restore", server.server, "--checkpoint", "before the cut")[0] == 0
    optimizer.pull()
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
    for _ in range(KEPT + 1):
        train()
        assert run(capsys, "checkpoint", "create", server.server)[0] == 0
    assert "before the cut" in listed(capsys, server), "going back is no leave to forget it"
    train()
    assert_same_parameters(model, server.server)


@pytest.mark.long
def test_what_is_between_a_named_checkpoint_and_the_rest_is_refused_by_its_version(shards, capsys):
    server, _, _, train = shards
    run(capsys, "checkpoint", "create", server.server, "--name", "old")
    for _ in range(KEPT + 1):
        train(2)
        run(capsys, "checkpoint", "create", server.server)
    code, printed = run(capsys, "restore", server.server, "--version", "2")
    assert code == 3
    assert "old" in printed.err
    assert run(capsys, "restore", server.server, "--version", "1")[0] == 0, "that of the named one"


@pytest.mark.long
def test_a_server_with_a_named_checkpoint_recovers_from_the_newest(shards, capsys):
    server, model, optimizer, train = shards
    run(capsys, "checkpoint", "create", server.server, "--name", "old")
    for _ in range(KEPT + 1):
        train()
        run(capsys, "checkpoint", "create", server.server)
    train()
    for index in (0, 1):
        server.processes[index].kill()
        server.restart(index)
    train()
    assert optimizer.version == KEPT + 4
    assert_same_parameters(model, server.server)
    assert "old" in listed(capsys, server)


def test_a_name_is_taken_once_and_free_again_when_it_was_deleted(shards, capsys):
    server, _, _, train = shards
    assert run(capsys, "checkpoint", "create", server.server, "--name", "a")[0] == 0
    train()
    code, printed = run(capsys, "checkpoint", "create", server.server, "--name", "a")
    assert code == 3
    assert "psservice checkpoint delete a" in printed.err
    assert run(capsys, "checkpoint", "create", server.server)[0] == 0
    code, printed = run(capsys, "checkpoint", "delete", "a", server.server)
    assert (code, "deleted" in printed.out) == (0, True)
    assert "a" not in listed(capsys, server)
    assert run(capsys, "checkpoint", "delete", "a", server.server)[0] == 3
    assert run(capsys, "checkpoint", "create", server.server, "--name", "a")[0] == 0


def test_what_a_server_would_recover_from_is_not_deleted(shards, capsys):
    server, *_ = shards
    assert run(capsys, "checkpoint", "create", server.server, "--name", "newest")[0] == 0
    code, printed = run(capsys, "checkpoint", "delete", "newest", server.server)
    assert code == 3
    assert "newest snapshot" in printed.err
    assert "newest" in listed(capsys, server)


def test_a_checkpoint_that_nobody_has_named_goes_by_itself(shards, capsys):
    server, _, _, train = shards
    run(capsys, "checkpoint", "create", server.server)
    (drawn,) = listed(capsys, server)
    train()
    run(capsys, "checkpoint", "create", server.server)
    code, printed = run(capsys, "checkpoint", "delete", drawn, server.server)
    assert code == 3
    assert "--keep-snapshots" in printed.err
    with pytest.raises(SystemExit) as ended:
        cli.main(["checkpoint", "create", server.server, "--name", drawn])
    assert ended.value.code == 2


def test_a_checkpoint_that_is_missing_is_answered_with_those_that_are_there(shards, capsys):
    server, *_ = shards
    run(capsys, "checkpoint", "create", server.server, "--name", "here")
    code, printed = run(capsys, "restore", server.server, "--checkpoint", "there")
    assert code == 3
    assert "'there'" in printed.err
    assert "here" in printed.err
    assert "proto" not in printed.err
    assert "psservice checkpoint list" in printed.err


def test_a_snapshot_of_one_shard_is_listed_with_the_shards_index(shards, capsys):
    server, *_ = shards
    call(server.addresses[1], "TakeSnapshot", pb.TakeSnapshotRequest(), 10)
    code, printed = run(capsys, "checkpoint", "list", server.server)
    assert code == 0
    assert "(of shard 1 alone)" in printed.out


def test_drain_and_stop_leaves_one_snapshot_of_its_version(tmp_path, capsys):
    with LocalServer(data_dir=tmp_path) as server:
        model = make_model(batch_norm=False)
        optimizer = psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server.server, settings=QUICK)
        train_step(model, optimizer, *make_data())
        code, printed = run(capsys, "drain", "--stop", server.server, "--output=json")
        assert code == 0
        checkpoint = json.loads(printed.out)[0]["snapshot"]["checkpoint"]
        assert server.processes[0].wait(60) == 0
        assert len([*tmp_path.glob("shard-0-of-1/snapshots/*-v1")]) == 1
        server.restart()
        assert checkpoint in listed(capsys, server)
        assert run(capsys, "restore", server.server, "--checkpoint", checkpoint)[0] == 0


@pytest.mark.long
@pytest.mark.parametrize(("to", "target"), [("checkpoint", "good"), ("version", "1")])
def test_a_restore_that_one_shard_cannot_do_takes_no_shard_back(to, target, shards, tmp_path, capsys):
    server, model, _, train = shards
    assert run(capsys, "checkpoint", "create", "--name", "good", *server.addresses)[0] == 0
    train()
    server.processes[1].kill()
    server.processes[1].wait()
    shutil.rmtree(tmp_path / "shard-1-of-2")
    server.restart(1)
    train(3)  # and upload the part of shard 1 again
    before = versions(server)
    code, printed = run(capsys, "restore", f"--{to}", target, *server.addresses)
    assert code == 3
    assert server.addresses[1] in printed.err
    assert server.addresses[0] not in printed.err
    assert "no shard was taken back" in printed.err
    assert versions(server) == before
    train()
    assert_same_parameters(model, server.server)


def versions(server):
    return [call(address, "GetStatus", pb.GetStatusRequest(), 10).version for address in server.addresses]

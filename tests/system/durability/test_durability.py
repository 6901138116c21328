"""Servers that are killed, stopped, restored: what was acknowledged is there, once, bit for bit."""

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import psclient
from psclient.rpc.local_server import LocalServer
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.cli.main import main
from psservice.ctl.client import call
from tests.system.tools import QUICK, assert_same_parameters, make_data, make_model, train_step, wait_until


def optimize(model, server, method=psclient.DGS, **options):
    options = {"settings": QUICK, "worker": "w", "momentum": 0.5} | options
    return method(model.parameters(), lr=0.05, density=0.05, model=model, server=server, **options)


def kill(server: LocalServer, shard: int = 0) -> None:
    """As the out-of-memory killer does it."""
    server.processes[shard].send_signal(signal.SIGKILL)
    server.restart(shard)


def state(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("down_mode", "fsync"), [("exact", "always"), ("topk", "interval")])
def test_training_goes_on_where_it_was_after_every_kill(down_mode, fsync, tmp_path):
    with LocalServer(data_dir=tmp_path, down_mode=down_mode, fsync=fsync, down_density=0.1) as server:
        model = make_model(batch_norm=False)
        optimizer = optimize(model, server)
        twin_model = make_model(batch_norm=False)
        with LocalServer(down_mode=down_mode, down_density=0.1) as calm:
            twin = optimize(twin_model, calm)
            for step in range(1, 13):
                train_step(model, optimizer, *make_data())
                train_step(twin_model, twin, *make_data())
                assert optimizer.version == step
                if step % 4 == 0:
                    kill(server)
            if down_mode == "exact":
                assert_equal(state(model), state(twin_model))
                assert_same_parameters(model, server.server)
            twin.close()
        optimizer.close()


def test_after_a_kill_a_worker_gets_a_sparse_difference(tmp_path):
    with LocalServer(data_dir=tmp_path, down_mode="exact") as server:
        model = make_model(batch_norm=False)
        with optimize(model, server) as optimizer:
            for _ in range(3):
                train_step(model, optimizer, *make_data())
            kill(server)
            train_step(model, optimizer, *make_data())
            assert optimizer.report.pull_entries < 0.3 * sum(p.numel() for p in model.parameters())
            assert_same_parameters(model, server.server)


def test_one_of_two_shards_is_killed(tmp_path):
    with LocalServer(shards=2, data_dir=tmp_path, down_mode="exact") as server:
        model = make_model()
        with optimize(model, server) as optimizer:
            for shard in (1, 0, 1):
                train_step(model, optimizer, *make_data())
                kill(server, shard)
            train_step(model, optimizer, *make_data())
            assert optimizer.version == 4
            assert_same_parameters(model, server.server)


def test_every_version_can_be_had_again_and_a_rollback_is_followed(tmp_path, capsys):
    data = tmp_path / "data"
    with LocalServer(data_dir=data, down_mode="exact") as server:
        model = make_model(batch_norm=False)
        with optimize(model, server) as optimizer:
            seen = {}
            for step in range(1, 8):
                train_step(model, optimizer, *make_data())
                seen[step] = state(model)
                if step == 4:
                    assert main(["checkpoint", "create", server.addresses[0], "--output=json"]) == 0
            checkpoint = json.loads(capsys.readouterr().out)[0]["checkpoint"]
            for version, expected in seen.items():
                out = tmp_path / f"{version}.safetensors"
                assert main(["replay", str(data), "--to", str(version), "--out", str(out)]) == 0
                assert_equal(load_file(out), expected)
            assert main(["restore", server.addresses[0], "--version", "5"]) == 0
            assert_equal(psclient.download(server.server), seen[5])
            for _ in range(2):  # the first is refused, goes back into the residual, and fetches the model
                train_step(model, optimizer, *make_data())
            assert optimizer.version == 6
            assert_same_parameters(model, server.server)
            assert main(["restore", server.addresses[0], "--checkpoint", checkpoint]) == 0
            assert_equal(psclient.download(server.server), seen[4])
            kill(server)
            assert_equal(psclient.download(server.server), seen[4])
            for _ in range(2):
                train_step(model, optimizer, *make_data())
            assert optimizer.version == 5
            assert_same_parameters(model, server.server)
            capsys.readouterr()
            assert main(["restore", server.addresses[0], "--version", "99"]) == 3
            assert "not covered" in capsys.readouterr().err


def test_a_stop_and_a_start_are_no_more_than_a_pause(tmp_path):
    with LocalServer(data_dir=tmp_path, down_mode="exact") as server:
        model = make_model()
        with optimize(model, server) as optimizer:
            train_step(model, optimizer, *make_data())
            server.processes[0].send_signal(signal.SIGTERM)
            server.restart()
            train_step(model, optimizer, *make_data())
            assert optimizer.version == 2
            assert optimizer.report.pull_entries < 0.3 * sum(p.numel() for p in model.parameters())


def test_without_a_journal_the_last_snapshot_is_where_training_goes_on(tmp_path):
    with LocalServer(data_dir=tmp_path, durability="snapshot", down_mode="exact") as server:
        model = make_model(batch_norm=False)
        with optimize(model, server) as optimizer:
            for _ in range(3):
                train_step(model, optimizer, *make_data())
            assert main(["checkpoint", "create", server.addresses[0]]) == 0
            train_step(model, optimizer, *make_data())
            kill(server)
            for _ in range(2):  # the first is refused, and fetches the model
                train_step(model, optimizer, *make_data())
            assert optimizer.version == 4
            assert_same_parameters(model, server.server)


@pytest.mark.long
def test_a_checkpoint_of_two_shards_starts_four(tmp_path, capsys):
    with LocalServer(shards=2, data_dir=tmp_path / "two", down_mode="exact") as server:
        model = make_model().to(torch.bfloat16)
        with optimize(model, server) as optimizer:
            for _ in range(3):
                train_step(model, optimizer, *make_data(dtype=torch.bfloat16))
        assert main(["checkpoint", "create", "--output=json", *server.addresses]) == 0
        (checkpoint,) = {answer["checkpoint"] for answer in json.loads(capsys.readouterr().out)}
        expected = psclient.download(server.server)
    with LocalServer(4, init=tmp_path / "two", init_checkpoint=checkpoint, data_dir=tmp_path / "four") as server:
        model = make_model(1).to(torch.bfloat16)
        with optimize(model, server) as optimizer:
            assert optimizer.version == 3
            assert_equal(psclient.download(server.server), expected)
            train_step(model, optimizer, *make_data(dtype=torch.bfloat16))
            assert optimizer.version == 4
    out = tmp_path / "out.safetensors"
    assert main(["replay", str(tmp_path / "four"), "--to", "3", "--out", str(out)]) == 0
    assert_equal(load_file(out), expected)


def test_an_init_directory_without_the_checkpoint_is_refused_at_the_start(tmp_path):
    with pytest.raises(psclient.errors.ConfigurationError):
        LocalServer(init=tmp_path, init_checkpoint="e1-v3")


def test_a_second_server_on_the_directory_ends_with_the_reason(tmp_path):
    with LocalServer(data_dir=tmp_path), pytest.raises(psclient.errors.ConfigurationError):
        LocalServer(data_dir=tmp_path)


def test_shards_follow_the_checkpoints_of_shard_0(tmp_path):
    with LocalServer(shards=2, data_dir=tmp_path, snapshot_seconds=1, lease_seconds=1.5) as server:
        model = make_model()
        with optimize(model, server) as optimizer:
            train_step(model, optimizer, *make_data())

            def checkpoints() -> list[str]:
                answers = [call(a, "GetStatus", pb.GetStatusRequest(), 10.0) for a in server.addresses]
                return [answer.snapshot_checkpoint for answer in answers]

            wait_until(lambda: checkpoints()[0] != "" and checkpoints()[0] == checkpoints()[1])


def test_a_replay_says_what_is_missing(tmp_path, capsys):
    (tmp_path / "shard-0-of-2").mkdir()
    out = str(tmp_path / "out.safetensors")
    assert main(["replay", str(tmp_path / "nothing"), "--out", out]) == 1
    assert "--data-dir" in capsys.readouterr().err
    assert main(["replay", str(tmp_path), "--out", out]) == 1
    assert "lacks shard 1 of 2" in capsys.readouterr().err
    assert not Path(out).exists()

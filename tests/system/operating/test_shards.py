"""``psservice serve --shards``: one command, several shards, one address for workers and operators."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import psclient
from psclient.cli import main as psclient_main
from psclient.errors import RefusedError
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.cli import main as cli
from psservice.ctl.client import call
from tests.system.operating.asking import metrics, status
from tests.system.serving import SHARDS, Command, serving
from tests.system.tools import QUICK, assert_same_parameters, make_data, make_model, run_of, train_step, wait_until


def dgs(model, server, **options):
    given = {"density": 0.01, "settings": QUICK} | options  # one worker at a density is answered exactly
    return psclient.DGS(model.parameters(), lr=0.1, model=model, server=server, **given)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def run_json(capsys, *words):
    capsys.readouterr()
    code = cli.main([*words, "--output=json"])
    return code, json.loads(capsys.readouterr().out)


def is_healthy(command):
    return cli.main(["health", command.ready["health"], "--timeout", "30"]) == 0


def test_one_address_is_enough_for_workers_and_operators(tmp_path, capsys):
    with serving(tmp_path / "log", data_dir=tmp_path / "data") as command:
        model = make_model()
        optimizer = dgs(model, command.address, worker="w")
        for _ in range(3):
            train_step(model, optimizer, *make_data())
        assert [shard.address for shard in run_of(optimizer).shards] == [command.address_of(i) for i in range(SHARDS)]
        assert_same_parameters(model, command.address)
        for any_shard in range(SHARDS):
            code, rows = run_json(capsys, "status", command.address_of(any_shard))
            assert (code, [row["shard_index"] for row in rows]) == (0, [0, 1, 2])
        code, frame = run_json(capsys, "top", command.address, "--once", "--interval-seconds", "0.1")
        assert [shard["address"] for shard in frame["shards"]] == [command.address_of(i) for i in range(SHARDS)]
        assert frame["workers"][0]["missing_shards"] == []
        code, taken = run_json(capsys, "checkpoint", "create", command.address, "--name", "here")
        assert (code, len({each["path"] for each in taken})) == (0, SHARDS)
        train_step(model, optimizer, *make_data())
        code, restored = run_json(capsys, "restore", command.address, "--checkpoint", "here")
        assert (code, [each["version"] for each in restored]) == (0, [3, 3, 3])
        assert psclient_main(["save", command.address, "--out", str(tmp_path / "model.safetensors")]) == 0
        for shard in range(SHARDS):
            assert f'shard="{shard}"' in metrics(command.address_of(shard, "metrics"))
        optimizer.close()
    serve_lines = [line for line in command.lines() if line["message"] == "serving"]
    assert {line["shard"] for line in serve_lines} == {0, 1, 2}


def test_a_shard_that_was_killed_comes_back_and_nothing_is_lost_or_counted_twice(tmp_path, capsys):
    with serving(tmp_path / "log", data_dir=tmp_path / "data", fsync="always") as command:
        model = make_model()
        optimizer = dgs(model, command.address, worker="w")
        for _ in range(SHARDS):  # the oldest process each time
            train_step(model, optimizer, *make_data())
            oldest, *others = command.shards
            os.kill(oldest, signal.SIGKILL)
            wait_until(lambda: command.shards[:-1] == others)  # noqa: B023
            train_step(model, optimizer, *make_data())
        assert_same_parameters(model, command.address)
        assert [status(command.address_of(shard)).version for shard in range(SHARDS)] == [6, 6, 6]
        wait_until(lambda: is_healthy(command))
        optimizer.close()
    ended = [line for line in command.lines() if line["message"].startswith("a shard has ended")]
    assert [(line["shard"], line["status"]) for line in ended] == [(0, 137), (1, 137), (2, 137)]
    assert command.process.returncode == 0


def test_without_a_data_directory_workers_refill_a_shard_that_was_killed(tmp_path):
    with serving(tmp_path / "log") as command:
        model = make_model(batch_norm=False)
        optimizer = dgs(model, command.address, worker="w")
        train_step(model, optimizer, *make_data())
        os.kill(command.shards[1], signal.SIGKILL)
        train_step(model, optimizer, *make_data())
        assert_same_parameters(model, command.address)
        optimizer.close()


def test_health_is_that_of_all_shards(tmp_path, capsys):
    with serving(tmp_path / "log") as command:
        assert is_healthy(command)
        drain = pb.DrainRequest(action=pb.DRAIN_ACTION_CLOSE)
        call(command.address_of(2), "Drain", drain, 30.0)
        wait_until(lambda: not is_healthy(command))
        assert cli.main(["drain", "--undo", command.address]) == 0
        wait_until(lambda: is_healthy(command))


@pytest.mark.long
def test_the_end_of_the_command_is_the_end_of_all_and_another_number_is_told_what_to_do(tmp_path, capsys):
    data = tmp_path / "data"
    with serving(tmp_path / "log", data_dir=data) as command:
        model = make_model(batch_norm=False)
        optimizer = dgs(model, command.address)
        train_step(model, optimizer, *make_data())
        optimizer.close()
        shards = command.shards
    assert command.process.returncode == 0
    assert not any(map(is_alive, shards))

    other = Command(tmp_path / "other", shards=2, data_dir=data)
    assert (other.process.wait(60), other.ready) == (1, {})
    assert f"--shards {SHARDS}" in other.log.read_text()
    assert "--init" in other.log.read_text()
    with serving(tmp_path / "moved", shards=2, data_dir=tmp_path / "new", init=data) as moved:
        again = make_model(seed=1, batch_norm=False)
        dgs(again, moved.address).close()
        for mine, before in zip(again.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, before)
    with serving(tmp_path / "same", data_dir=data) as same:
        assert status(same.address).version == 1


def test_drain_and_stop_ends_the_command(tmp_path, capsys):
    with serving(tmp_path / "log") as command:
        assert cli.main(["drain", "--stop", command.address]) == 0
        assert command.process.wait(60) == 0


def test_ctrl_c_at_a_terminal_ends_the_command_in_order(tmp_path):
    with serving(tmp_path / "log") as command:
        shards = command.shards
        os.killpg(command.process.pid, signal.SIGINT)  # LocalServer's processes begin a session
        assert command.process.wait(60) == 0
        assert not any(map(is_alive, shards))
    assert "Traceback" not in command.log.read_text()


def test_no_shard_outlives_a_command_that_was_killed(tmp_path):
    with serving(tmp_path / "log") as command:
        shards = command.shards
        command.process.kill()
        wait_until(lambda: not any(map(is_alive, shards)))


def test_a_port_of_the_row_that_is_taken_is_named_and_nothing_is_left(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = Command(tmp_path / "log", listen=f"127.0.0.1:{port - 1}")
        assert (command.process.wait(60), command.ready) == (1, {})
    assert f"shard 1: cannot listen on 127.0.0.1:{port} (--listen)" in command.log.read_text()


def test_more_shards_than_elements_are_refused_when_a_worker_joins(tmp_path):
    with serving(tmp_path / "log") as command, pytest.raises(RefusedError, match="2 elements cannot be cut into 3"):
        dgs(torch.nn.Linear(1, 1), command.address)


LIVES = """
import os, signal, sys
from psservice.process import shard_processes
from psservice.settings import ServerSettings

shard_processes._FIRST_DELAY_SECONDS = 0.0

def serve(settings, health):
    if settings.shard_index == 0:
        signal.pause()
    health.note(1, has_started=sys.argv[2] == "started", serves=True, is_broken=False)
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return int(sys.argv[1])

signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
settings = ServerSettings(shards=2, listen="127.0.0.1:0")
sys.exit(shard_processes.ShardProcesses(settings, serve).run())
"""


@pytest.mark.parametrize(
    ("end", "state", "status", "why"),
    [
        ("1", "new", 1, "a shard cannot start"),
        ("70", "started", 70, "a shard has ended too often"),
        ("kill", "started", 137, "a shard has ended too often"),
        ("0", "started", 0, "a shard was told to stop"),
    ],
)
def test_how_a_shard_ends_decides_how_all_end(end, state, status, why):
    program = f"import logging; logging.basicConfig(level='INFO', force=True)\n{LIVES}"
    answer = subprocess.run([sys.executable, "-c", program, end, state], capture_output=True, text=True, timeout=60)
    assert answer.returncode == status, answer.stderr
    assert answer.stderr.count("is started again") == (6 if "often" in why else 0)


def test_an_embedded_shard_is_started_again_at_its_old_addresses():
    """With free ports of its own choice it could take that of another shard that is down too."""
    with psclient.LocalServer(shards=2, health_listen="127.0.0.1:0") as server:
        before = [*server.addresses], [*server.metrics_addresses], [*server.health_addresses]
        for process in server.processes:
            process.kill()
        for shard in range(2):
            server.restart(shard)
        assert before == (server.addresses, server.metrics_addresses, server.health_addresses)

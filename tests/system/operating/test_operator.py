"""What an operator's commands print, and their exit statuses, with real processes."""

import json
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import psclient
from psclient import cli as client_cli
from psclient.rpc.local_server import LocalServer
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.cli import main as cli
from psservice.ctl.client import call
from tests.system.operating.asking import looks, run, run_json, status
from tests.system.tools import QUICK, assert_same_parameters, make_data, make_model, suspend, train_step, wait_until

NOWHERE = "127.0.0.1:9"


def test_workers_of_all_shards_in_one_table(two_shards, worker, capsys):
    code, found = run_json(capsys, "workers", *reversed(two_shards.addresses))
    assert code == 0
    (only,) = found["workers"]
    assert only["worker_id"] == "w"
    assert set(only["staleness"]) == {"0", "1"}
    assert only["missing_shards"] == found["unreached"] == []
    assert only["push_bytes"] == worker[1].totals.push_bytes
    assert only["step"] == status(two_shards.addresses[1]).workers[0].last_step
    code, printed = run(capsys, "workers", two_shards.server)
    assert code == 0
    assert only["incarnation"][:8] in printed.out


def test_without_addresses_the_servers_are_the_workers(two_shards, worker, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PSCLIENT_SERVER", two_shards.server)
    assert client_cli.main(["save", "--out", str(tmp_path / "model.safetensors")]) == 0
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in psclient.download(two_shards.server).items())
    code, found = run_json(capsys, "workers")
    assert (code, [each["worker_id"] for each in found["workers"]]) == (0, ["w"])
    code, printed = run(capsys, "evict", "nobody")
    assert code == 3
    assert all(address in printed.out + printed.err for address in two_shards.addresses)
    assert run(capsys, "status", NOWHERE)[0] == 1, "an address that is given goes first"
    monkeypatch.setenv("PSCLIENT_SERVER", "")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["status"])
    assert "required: ADDRESS" in capsys.readouterr().err


def test_a_frame_of_top_has_shards_rates_and_workers(two_shards, worker, capsys):
    code, frame = run_json(capsys, "top", two_shards.server, "--once", "--interval-seconds", "0.1")
    assert code == 0
    assert [shard["shard_index"] for shard in frame["shards"]] == [0, 1]
    assert [shard["pushes_per_second"] for shard in frame["shards"]] == [0, 0]
    assert all(shard["dense_push_bytes"] >= 4 * shard["length"] for shard in frame["shards"])
    assert [each["worker_id"] for each in frame["workers"]] == ["w"]
    code, printed = run(capsys, "top", NOWHERE, two_shards.server, "--interval-seconds", "0.1")
    assert code == 4, "one of three does not answer"
    assert "no answer" in printed.out
    assert "2 of 2 shards, 1 worker," in printed.out


def test_top_goes_on_line_by_line_until_it_is_interrupted(two_shards):
    command = [
        sys.executable,
        "-m",
        "psservice",
        "top",
        two_shards.server,
        "--output=json",
        "--interval-seconds",
        "0.1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        frames = [json.loads(process.stdout.readline()) for _ in range(2)]
        assert frames[0]["unix_seconds"] < frames[1]["unix_seconds"]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_exit_statuses_tell_unreachable_wrong_refused_and_partial(two_shards, worker, capsys):
    quick = ("--timeout", "20")
    for command in (
        ["status"],
        ["workers"],
        ["finish"],
        ["checkpoint", "create"],
        ["restore", "--version", "1"],
        ["drain"],
        ["evict", "w"],
    ):
        assert run(capsys, *command, NOWHERE, *quick)[0] == 1, command
    assert run(capsys, "status", NOWHERE, two_shards.server, *quick)[0] == 4
    assert run(capsys, "restore", two_shards.server, "--checkpoint", "no-such")[0] == 3
    assert run(capsys, "evict", "nobody", two_shards.server)[0] == 3
    assert run(capsys, "evict", "nobody", two_shards.addresses[0], NOWHERE, *quick)[0] == 1, "that one may have it"
    before = [status(address).snapshot_checkpoint for address in two_shards.addresses]
    code, printed = run(capsys, "checkpoint", "create", two_shards.server, NOWHERE, *quick)
    assert (code, "no checkpoint was taken" in printed.err) == (1, True), "a checkpoint is of all shards or of none"
    assert [status(address).snapshot_checkpoint for address in two_shards.addresses] == before
    for wrong in (
        ["status", "no-port"],
        ["evict", "w", NOWHERE, "--ban-seconds", "nan"],
        ["top", NOWHERE, "--interval-seconds", "0"],
        ["restore", NOWHERE, "--version", "-1"],
        ["restore", NOWHERE, "--version", str(2**64)],
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(wrong)
        assert ended.value.code == 2, wrong


@pytest.mark.parametrize(
    "words",
    [
        ["checkpoint", "create"],
        ["restore", "--version", "1"],
        ["drain"],
        ["drain", "--stop"],
        ["drain", "--undo"],
        ["evict", "w"],
        ["finish"],
    ],
    ids=" ".join,
)
def test_what_changes_a_run_takes_all_its_shards(words, two_shards, worker, capsys):
    def seen():
        found = [status(address) for address in two_shards.addresses]
        return [(s.generation, s.snapshot_checkpoint, s.run_state, s.draining, len(s.workers)) for s in found]

    before = seen()
    code, printed = run(capsys, *words, two_shards.addresses[1])
    assert code == 2
    assert "1 of the run's 2 shards were named; nothing was done" in printed.err
    assert seen() == before


def test_a_shard_that_goes_back_alone_holds_no_worker_up(tmp_path, capsys):
    with LocalServer(shards=2, data_dir=tmp_path) as server:
        model = make_model(batch_norm=False)
        optimizer = psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server.server, settings=QUICK)
        for _ in range(3):
            train_step(model, optimizer, *make_data())
        call(server.addresses[0], "RestoreModel", pb.RestoreModelRequest(version=1), 30.0)  # as if one had refused
        for _ in range(2):  # what shard 0 has refused of the first goes with the second
            train_step(model, optimizer, *make_data())
        optimizer.pull()
        assert_same_parameters(model, server.server)
        assert run(capsys, "restore", server.server, "--version", "1")[0] == 0
        for _ in range(2):
            train_step(model, optimizer, *make_data())
        optimizer.pull()
        assert_same_parameters(model, server.server)
        optimizer.close()


def test_what_is_no_server_and_a_token_that_cannot_be_sent_are_said(two_shards, capsys, monkeypatch):
    code, printed = run(capsys, "status", two_shards.health_addresses[0])
    assert code == 3
    assert "not its --health-listen" in printed.err
    monkeypatch.setenv("PSCLIENT_TOKEN", "two\nlines")
    code, printed = run(capsys, "status", two_shards.server)
    assert code == 2
    assert "PSCLIENT_TOKEN" in printed.err


def test_output_that_nobody_reads_or_no_terminal_can_show_is_no_traceback(two_shards):
    command = [sys.executable, "-m", "psservice"]
    for words in (
        ["status", "--output=json"],
        ["workers", "--output=json"],
        ["top", "--once", "--interval-seconds", "0.1"],
    ):
        read_end, write_end = os.pipe()
        os.close(read_end)
        with os.fdopen(write_end, "wb") as unread:
            ended = subprocess.run(
                [*command, *words, two_shards.server], stdout=unread, stderr=subprocess.PIPE, text=True, timeout=60
            )
        assert (ended.returncode, ended.stderr) == (141, ""), words
    ended = subprocess.run(
        [*command, "top", "--once", "--interval-seconds", "0.1", two_shards.server, NOWHERE],
        capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert ended.returncode == 4, ended.stderr
    assert "no answer" in ended.stdout
    assert NOWHERE in ended.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_output_that_cannot_be_written_has_a_message_and_a_status(two_shards):
    for words in (["status"], ["status", "--output=json"], ["top", "--once", "--interval-seconds", "0.1"]):
        with open("/dev/full", "wb") as full:
            ended = subprocess.run(
                [sys.executable, "-m", "psservice", *words, two_shards.server],
                stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
            )  # fmt: skip
        assert ended.returncode == 74, ended.stderr
        assert "could not be written" in ended.stderr
        assert "Traceback" not in ended.stderr
        assert "ignored" not in ended.stderr


def test_json_stays_json_where_stderr_is_closed(two_shards):
    command = [sys.executable, "-m", "psservice", "evict", "nobody", two_shards.server, "--output=json"]
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *command],
        stdout=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 3
    assert [each["reason"] for each in json.loads(ended.stdout)] == ["NO_SUCH_WORKER"] * 2


def test_names_that_are_no_utf_8_are_wrong_usage(two_shards, capsys):
    name = os.fsdecode(b"worker-\xff")
    for words in (["evict", name, two_shards.server], ["restore", "--checkpoint", name, two_shards.server]):
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 2
        assert "not valid UTF-8" in capsys.readouterr().err


def test_ctrl_c_ends_a_command_that_waits(two_shards):
    pid = two_shards.processes[1].pid
    before = looks(two_shards.metrics_addresses[0])
    suspend(pid)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "psservice", "drain", "--undo", two_shards.server], stderr=subprocess.PIPE, text=True
        )
        wait_until(lambda: looks(two_shards.metrics_addresses[0]) > before)  # so the other is asked too
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=60)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert process.returncode == 130
    assert "interrupted" in printed
    assert "Traceback" not in printed


@pytest.mark.long
def test_no_shard_goes_back_if_one_cannot_write_the_older_model_down(tmp_path, capsys):
    with LocalServer(shards=2, data_dir=tmp_path) as server:
        model = make_model(batch_norm=False)
        optimizer = psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server.server, settings=QUICK)
        for _ in range(3):
            train_step(model, optimizer, *make_data())
        before = [status(address).generation for address in server.addresses]
        resource.prlimit(server.processes[1].pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        code, printed = run(capsys, "restore", server.server, "--version", "1")
        assert code != 0
        assert "no shard was taken back" in printed.err
        assert [status(address).generation for address in server.addresses] == before
        resource.prlimit(server.processes[1].pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        train_step(model, optimizer, *make_data())
        optimizer.pull()
        assert_same_parameters(model, server.server)
        optimizer.close()

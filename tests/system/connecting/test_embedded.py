"""The embedded server: a first script needs no second terminal, and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import psclient
from psclient.errors import ConfigurationError
from psclient.rpc import local_server
from psclient.rpc.local_server import LocalServer
from tests.system.tools import make_data, make_model, suspend, train_step, wait_until

SCRIPT = """
import json, os, sys, torch, psclient
from tests.system.tools import make_data, make_model, own_server, train_step
model = make_model()
optimizer = psclient.DGS(model.parameters(), lr=0.1, model=model, server=SERVER)
for _ in range(3):
    train_step(model, optimizer, *make_data())
server = own_server(optimizer)
pids = [p.pid for p in server.processes] if server else []
print(json.dumps({"version": optimizer.version, "server": optimizer.server, "pids": pids}), flush=True)
if "--wait" in sys.argv:
    sys.stdin.read()
"""


SERVER_OPTIMIZER = """
import sys, psclient
from tests.system.tools import make_data, make_model, train_step
model = make_model(batch_norm=False)
log = open(sys.argv[1], "w")
with psclient.LocalServer(log_format="json", log_level="info", log_to=log) as server:
    with psclient.ServerOptimizer(model.parameters(), "AdamW", model=model, server=server) as optimizer:
        train_step(model, optimizer, *make_data())
"""


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def start(*arguments, script=SCRIPT, server="local", **environment):
    return subprocess.Popen(
        [sys.executable, "-c", script.replace("=SERVER", f"={server!r}"), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def test_it_starts_and_stops_with_the_script():
    process = start()
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    told = json.loads(out)
    assert err == ""
    assert told["version"] == 3
    assert told["server"].startswith("127.0.0.1:")
    assert not any(alive(pid) for pid in told["pids"])


def test_a_server_with_an_optimizer_of_torchs_writes_its_own_log_lines_only(tmp_path):
    process = start(str(tmp_path / "log"), script=SERVER_OPTIMIZER)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    messages = [json.loads(line)["message"] for line in (tmp_path / "log").read_text().splitlines()]
    assert (messages[0], messages[-1]) == ("serving", "stopped")


def test_it_ends_when_the_script_is_killed():
    process = start("--wait")
    told = json.loads(process.stdout.readline())
    assert all(alive(pid) for pid in told["pids"])
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    wait_until(lambda: not any(alive(pid) for pid in told["pids"]))


def test_the_environment_names_it():
    with LocalServer() as server:
        process = start(server=None, PSCLIENT_SERVER=server.server)
        out, err = process.communicate(timeout=90)
        assert process.returncode == 0, err
        assert json.loads(out) == {"version": 3, "server": server.server, "pids": []}


def test_a_script_that_forgets_it_is_told_instead_of_training_alone():
    model = make_model()
    with pytest.raises(ConfigurationError, match=r'no server is named: .*PSCLIENT_SERVER.*server="local"'):
        psclient.DGS(model.parameters(), lr=0.1, model=model)


def test_a_mistyped_address_is_no_reason_to_train_alone():
    process = start(PSCLIENT_SEVER="127.0.0.1:9")
    _, err = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "PSCLIENT_SEVER: there is no such setting; did you mean PSCLIENT_SERVER?" in err


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_NTASKS", "JOB_COMPLETION_INDEX"])
def test_several_workers_without_an_address_are_an_error(monkeypatch, variable):
    monkeypatch.setenv(variable, "2")
    model = make_model()
    with pytest.raises(ConfigurationError, match=f"{variable}.*alone"):
        psclient.DGS(model.parameters(), lr=0.1, model=model, server="local")


def test_a_bad_server_setting_is_said():
    with pytest.raises(ConfigurationError, match="status 2"):
        LocalServer(down_density=7)


def test_momentum_sgd_needs_no_server():
    model = make_model()
    optimizer = psclient.MomentumSGD(model.parameters(), lr=0.1)
    losses = [train_step(model, optimizer, *make_data()) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_shards_that_hang_are_stopped_together(monkeypatch):
    monkeypatch.setattr(local_server, "_STOP_SECONDS", 4.0)
    server = LocalServer(shards=3)
    for process in server.processes:
        suspend(process.pid)
    started = time.monotonic()
    server.stop()
    assert time.monotonic() - started < 8, "one deadline for all, not one after the other"
    assert [process.poll() for process in server.processes] == [-signal.SIGKILL] * 3


def test_a_shard_that_hangs_does_not_keep_the_others_from_ending_in_order(monkeypatch):
    monkeypatch.setattr(local_server, "_STOP_SECONDS", 10.0)
    server = LocalServer(shards=2)
    suspend(server.processes[0].pid)
    server.stop()
    assert [process.poll() for process in server.processes] == [-signal.SIGKILL, 0]

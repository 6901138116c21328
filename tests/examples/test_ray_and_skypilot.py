"""The quickstart's workers under Ray Train, and under SkyPilot by what it would run on each node."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

import psclient
from psclient.settings import ClientSettings
from tests.system.serving import ports_in_a_row

ROOT = Path(__file__).parents[2]
LAUNCHERS = ROOT / "examples" / "launchers"
SKYPILOT = ["skypilot_servers.yaml", "skypilot_workers.yaml"]


def require(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_two_workers_of_ray_train_share_a_model(tmp_path):
    require("ray")
    with psclient.LocalServer() as server:
        command = [sys.executable, LAUNCHERS / "ray_train.py", "--epochs", "1", "--cpus", "0.5", "--storage", tmp_path]
        environment = os.environ | {
            "PSCLIENT_SERVER": server.server,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=350)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "worker 0: 22 steps, loss" in done.stdout
        assert psclient.download(server.server)


def test_ray_train_needs_a_server(tmp_path):
    require("ray")
    environment = {name: value for name, value in os.environ.items() if name != "PSCLIENT_SERVER"}
    command = [sys.executable, LAUNCHERS / "ray_train.py"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "no server" in done.stderr


@pytest.mark.parametrize("name", SKYPILOT)
def test_skypilot_reads_its_tasks(name, tmp_path, monkeypatch):
    require("sky")
    import sky

    (tmp_path / "certificates" / "psclient").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load((LAUNCHERS / name).read_text())
    run = config["run"]  # which SkyPilot takes out
    task = sky.Task.from_yaml_config({**config}, env_overrides=[("PSCLIENT_SERVER", "1.2.3.4:50051")])
    assert task.run == run
    assert task.num_nodes == config.get("num_nodes", 1)


@contextmanager
def node(name, home, port, **variables):
    """What SkyPilot runs on a node, in a home of its own; servers listen at ``port`` of loopback."""
    task = yaml.safe_load((LAUNCHERS / name).read_text())
    programs = home / "bin"
    programs.mkdir(exist_ok=True)
    for program, words in (("psservice", "-m psservice"), ("python", "")):
        (programs / program).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (programs / program).chmod(0o755)
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home), "PATH": f"{programs}:{os.environ['PATH']}",
        **{key: value for key, value in task["envs"].items() if value is not None}, **variables,
    }  # fmt: skip
    script = f"set -eu\n{task['run']}".replace("0.0.0.0:50051", f"127.0.0.1:{port}")
    process = subprocess.Popen(
        ["bash", "-c", script], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_skypilot_runs_trains(tmp_path):
    """Servers and workers with certificates and roles, on loopback, each in a home of its own."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed")
    homes = {name: tmp_path / name for name in ("servers", "worker-0", "worker-1")}
    for home in homes.values():
        home.mkdir()
    made = homes["servers"] / "certificates"
    subprocess.run([ROOT / "deploy/kubernetes/make-certificates", made], check=True, capture_output=True, timeout=60)
    mounts = yaml.safe_load((LAUNCHERS / "skypilot_workers.yaml").read_text())["file_mounts"]
    ((target, source),) = mounts.items()
    for name in ("worker-0", "worker-1"):
        shutil.copytree(tmp_path / "servers" / source, homes[name] / target.removeprefix("~/"))
    port = ports_in_a_row(2)
    with ExitStack() as running:
        server = running.enter_context(node("skypilot_servers.yaml", homes["servers"], port))
        address = f"127.0.0.1:{port}"
        workers = [
            running.enter_context(
                node("skypilot_workers.yaml", homes[f"worker-{rank}"], port, PSCLIENT_SERVER=address, EPOCHS="1",
                     FIRST_WORKER="1", WORLD_SIZE="3", SKYPILOT_NODE_RANK=str(rank))
            )
            for rank in range(2)
        ]  # fmt: skip
        for number, worker in enumerate(workers, 1):
            said, _ = worker.communicate(timeout=200)
            assert worker.returncode == 0, said
            assert f"worker {number}: step" in said
        assert server.poll() is None
        with pytest.raises(psclient.errors.SparsepsError):  # nobody without a certificate
            psclient.download(address, ClientSettings(connect_seconds=1, deadline_seconds=1))

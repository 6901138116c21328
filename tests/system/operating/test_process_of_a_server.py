"""The server's process: signals other than SIGTERM, closed standard streams, and where it imports from."""

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch

import psclient
from psclient import LocalServer
from tests.system.operating.asking import status, versions
from tests.system.tools import wait_until
from tests.tiers import long_but

ROOT = Path(__file__).parents[3]
FLAGS = ("--listen=127.0.0.1:0", "--health-listen=", "--metrics-listen=")
SECONDS = 60


def push(server):
    w = torch.nn.Parameter(torch.zeros(8))
    with psclient.ASGD([w], lr=0.1, server=server) as optimizer:
        w.sum().backward()
        optimizer.step()


@contextlib.contextmanager
def started(*flags, stderr=None, is_heard=True, **options):
    """Start a server; yield its process and a function that waits for its address, which nobody can if not heard."""
    read_end, write_end = os.pipe()
    if not is_heard:
        os.close(read_end)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-m", "psservice", "serve", *FLAGS, *flags, f"--ready-fd={write_end}"],
        pass_fds=(write_end,), env=os.environ | {"PYTHONPATH": path}, stderr=stderr, **options,
    )  # fmt: skip
    os.close(write_end)

    def address():
        with os.fdopen(read_end) as stream:
            return json.loads(stream.readline())["address"]

    try:
        yield process, address
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("shards", "word"), [((), "serving"), (("--shards=2",), "all shards serve")])
def test_a_server_serves_although_nobody_reads_its_addresses(shards, word, tmp_path):
    path = tmp_path / "log"
    with path.open("w") as log, started("--log-level=info", *shards, stderr=log, is_heard=False) as (process, _):
        wait_until(lambda: word in path.read_text())
        process.terminate()
        assert process.wait(SECONDS) == 0
    assert "Traceback" not in path.read_text()


def test_sighup_ends_no_server_and_has_files_read(tmp_path):
    log, tokens = tmp_path / "log", tmp_path / "tokens"
    tokens.write_text("admin secret\n")
    with log.open("w") as stream, LocalServer(tokens=tokens, log_to=stream, log_level="info") as server:
        server.processes[0].send_signal(signal.SIGHUP)
        wait_until(lambda: "SIGHUP" in log.read_text())
        tokens.write_text("admin other\n")
        server.processes[0].send_signal(signal.SIGHUP)
        wait_until(lambda: "tokens read again" in log.read_text())  # nobody calls
        assert server.processes[0].poll() is None
    assert server.processes[0].returncode == 0


def test_sighup_to_the_command_ends_none_of_its_shards(tmp_path):
    with (tmp_path / "log").open("w") as log, started("--shards=2", stderr=log) as (process, address):
        at = address()
        push(at)
        for _ in range(3):
            process.send_signal(signal.SIGHUP)
        wait_until(lambda: (tmp_path / "log").read_text().count("SIGHUP") >= 2)  # each shard has heard it
        assert status(at).version == 1
        push(at)
        assert status(at).version == 2
        process.terminate()
        assert process.wait(SECONDS) == 0


@pytest.mark.long
@pytest.mark.executes_python
def test_sighup_does_not_end_a_server_that_begins():
    with started() as (process, address):

        def catches_it():
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            caught = next(line for line in lines if line.startswith("SigCgt"))
            return int(caught.split()[1], 16) >> (signal.SIGHUP - 1) & 1

        wait_until(catches_it)
        process.send_signal(signal.SIGHUP)
        assert address()
        process.terminate()
        assert process.wait(SECONDS) == 0


@pytest.mark.long
@pytest.mark.executes_python
def test_a_terminal_that_is_closed_takes_no_model_with_it():
    ours, theirs = pty.openpty()

    def take_terminal():
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    with started(**streams, start_new_session=True, preexec_fn=take_terminal) as (process, address):
        os.close(theirs)
        at = address()
        push(at)
        os.close(ours)  # the kernel sends SIGHUP; from now on the log cannot be written
        push(at)
        assert status(at).version == 2
        process.terminate()
        assert process.wait(SECONDS) == 0


@pytest.mark.executes_python
@pytest.mark.parametrize(
    "closed",
    long_but(["0<&- 1>&- 2>&-"], ["2>&-", "1>&-", "0<&-", "0<&- 1>&- 2>&-"]),
)
def test_a_server_runs_with_closed_streams(closed, tmp_path):
    script = f'exec "$@" {closed}'
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "psservice", "serve", *FLAGS, f"--data-dir={tmp_path}", f"--ready-fd={write_end}"]
    with subprocess.Popen(["sh", "-c", script, "sh", *command], pass_fds=(write_end,), cwd=ROOT) as process:
        os.close(write_end)
        try:
            with os.fdopen(read_end) as ready:
                at = json.loads(ready.readline())["address"]
            files = [os.path.realpath(f"/proc/{process.pid}/fd/{number}") for number in range(3)]
            assert not [file for file in files if "socket:" in file or str(tmp_path) in file]
            push(at)
            process.terminate()
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()


@pytest.mark.executes_python
@pytest.mark.parametrize("program", long_but(["psservice"], ["psservice", "psclient"]))
def test_no_message_of_an_error_takes_the_place_of_the_output(program):
    words = ["status", "127.0.0.1:1"] if program == "psservice" else ["save", "127.0.0.1:1", "--out", "/no/model"]
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", program, *words, "--timeout", "1"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (1, b"")


@pytest.mark.long
@pytest.mark.executes_python
def test_a_worker_with_closed_streams_starts_a_server_of_its_own():
    script = (
        "import torch, psclient; w = torch.nn.Parameter(torch.zeros(8)); "
        "o = psclient.ASGD([w], lr=0.1, server='local'); "
        "w.sum().backward(); o.step(); assert o.version == 1; o.close()"
    )
    command = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", sys.executable, "-c", script]
    assert subprocess.run(command, cwd=ROOT, timeout=2 * SECONDS).returncode == 0


@pytest.mark.long
@pytest.mark.executes_python
def test_an_embedded_server_imports_nothing_from_the_working_directory(tmp_path, monkeypatch):
    for name in ("prometheus_client", "queue", "psservice", "pythonjsonlogger"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported from the working directory')\n")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    with LocalServer() as server:
        assert versions(server) == [0]


@pytest.mark.long
@pytest.mark.executes_python
def test_a_package_that_is_not_installed_serves_itself(tmp_path, monkeypatch):
    """A checkout that a script has found in its working directory."""
    for name in ("psclient", "psservice", "pscore"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    script = "import psclient\nwith psclient.LocalServer() as server: assert server.server\n"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, timeout=2 * SECONDS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""Forks beside a live optimizer: children that do not train are left alone, and those that would train are refused."""

import subprocess
import sys

import pytest

from psclient.rpc.local_server import LocalServer

pytestmark = pytest.mark.executes_python  # who loads gRPC first, and in which environment, is what is tested

FORKS = 40  # each method forks in each way


@pytest.mark.long
@pytest.mark.timeout(300)
def test_forked_processes_live_beside_a_training_worker():
    methods = ["--method", "dgs", "--method", "server rmsprop"]
    program = [sys.executable, "-m", "verify.forks", "--forks", str(FORKS), *methods]
    done = subprocess.run(program, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "0 children were aborted" in done.stdout


@pytest.fixture(scope="module")
def server():
    with LocalServer() as running:
        yield running.server


TRAINS_TOO = """
import os, signal, sys, torch, psclient
server, parent, *children = sys.argv[1:]

def make(name):
    layer = torch.nn.Linear(50, 2)
    return psclient.ASGD(layer.parameters(), lr=0.1, model=layer, server=server, worker=name)

DO = {
    "makes one": lambda: make("child"),
    "starts a server": lambda: psclient.ASGD([torch.nn.Parameter(torch.ones(3))], lr=0.1, server="local"),
    "steps": lambda: optimizer.step(),
    "pulls": lambda: optimizer.pull(),
    "downloads": lambda: psclient.download(server),
}
optimizer = make("parent")
optimizer.step()
if parent != "trains":
    optimizer.close()
if parent == "downloaded":
    psclient.download(server)
for child in children:
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # ends a child that hangs, with a signal
        try:
            DO[child]()
        except psclient.errors.ConfigurationError as error:
            print(error, flush=True)
            os._exit(0)
        os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.parametrize(
    ("parent", "children"),
    [
        ("trains", ["makes one", "starts a server", "steps", "pulls", "downloads"]),
        pytest.param("closed", ["makes one"], marks=pytest.mark.long),
        pytest.param("downloaded", ["downloads"], marks=pytest.mark.long),
    ],
)
def test_a_forked_child_that_would_talk_to_a_server_hears_at_once_how_to_start_it(parent, children, server):
    program = [sys.executable, "-c", TRAINS_TOO, server, parent, *children]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100)
    lines = done.stdout.splitlines()
    for child, said, status in zip(children, lines[::2], lines[1::2], strict=True):
        assert status == "0", (child, done.stderr)
        assert "forkserver" in said, child
        assert "spawn" in said, child


LATE = """
import os, sys
import grpc
import torch, psclient
layer = torch.nn.Linear(50, 2)
optimizer = psclient.ASGD(layer.parameters(), lr=0.1, model=layer, server=sys.argv[1])
for _ in range(2):
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.long
@pytest.mark.parametrize("variable", [None, "0", "1"])
def test_who_has_imported_grpc_with_its_fork_handlers_is_warned_once(variable, server):
    set_or_not = [f"GRPC_ENABLE_FORK_SUPPORT={variable}"] * (variable is not None)
    program = ["env", "-u", "GRPC_ENABLE_FORK_SUPPORT", *set_or_not, sys.executable, "-c", LATE, server]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert done.stderr.count("GRPC_ENABLE_FORK_SUPPORT=0") == (variable != "0"), done.stderr

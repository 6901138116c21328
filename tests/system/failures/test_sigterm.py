"""SIGTERM: what is held is pushed, only what is about to end is closed, and the script's own handler decides."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

import psclient
from psclient.rpc.local_server import LocalServer
from tests.system.tools import QUICK, own_server
from tests.tiers import long_but

ENTRIES = 1000

SCRIPT = """
import os, signal, sys, threading
import torch, psclient

server, method, handler = sys.argv[1:4]
stop, exits = [], {"exits": 7, "exits late": 7}.get(handler)

def on_sigterm(number, frame):
    stop.append(number)
    if exits is not None:
        sys.exit(exits)
    if handler == "calls what was there" and callable(before):
        before(number, frame)

if handler in ("flag", "exits"):
    signal.signal(signal.SIGTERM, on_sigterm)
if handler == "ignores":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
w = torch.nn.Parameter(torch.zeros(1000))
settings = psclient.ClientSettings(dense_below=0, index_codec="raw32")
joined = {"server": server, "worker": "w", "settings": settings}
if method == "outer":
    optimizer = psclient.Outer(torch.optim.SGD([w], lr=1.0), None, sync_every=1000, **joined)
else:
    overlap = method == "overlap"
    optimizer = psclient.GradientDropping([w], lr=1.0, density=0.01, overlap=overlap, **joined)
if handler in ("flag late", "exits late", "calls what was there"):
    before = signal.signal(signal.SIGTERM, on_sigterm)

def step():
    optimizer.zero_grad()
    w.sum().backward()
    optimizer.step()

step()
signals = 0
for _ in range(4):
    step()
    signals += 1
    if signals == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    if stop or handler == "ignores" and signals == 2:
        break
step()
optimizer.pull()
optimizer.state_dict()
if method == "flushed":
    optimizer._flush_on_exit()
step()
print("ended by itself", optimizer.finished, flush=True)
if handler != "ignores" and method == "deleted":
    del optimizer
"""


def run(server, *arguments):
    program = [sys.executable, "-c", SCRIPT, server.server, *arguments]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout, done.stderr


def pushed(server):
    return psclient.download(server.server)["parameter_0"]


@pytest.mark.parametrize("method", ["dropping", "overlap", "outer", "flushed", "deleted"])
@pytest.mark.parametrize("handler", long_but(["flag late"], ["flag", "flag late"]))
def test_a_handler_that_sets_a_flag_lets_the_script_end_as_it_will(server, method, handler):
    status, out, err = run(server, method, handler)
    assert (status, out) == (0, "ended by itself False\n"), err
    assert torch.equal(pushed(server), torch.full((ENTRIES,), -5.0)), "all five steps arrive, with what was held"


def test_a_handler_that_calls_what_was_there_before_it_decides_all_the_same(server):
    status, out, err = run(server, "dropping", "calls what was there")
    assert (status, out) == (0, "ended by itself False\n"), err
    assert torch.equal(pushed(server), torch.full((ENTRIES,), -5.0))


@pytest.mark.parametrize("method", ["dropping", "overlap", "outer"])
@pytest.mark.parametrize("handler", long_but(["exits late"], ["exits", "exits late"]))
def test_a_handler_that_ends_the_script_gives_its_status(server, method, handler):
    status, out, err = run(server, method, handler)
    assert (status, out) == (7, ""), err
    assert torch.equal(pushed(server), torch.full((ENTRIES,), -3.0))


@pytest.mark.parametrize("method", ["dropping", "outer"])
def test_without_a_handler_the_script_ends_there(server, method):
    status, out, err = run(server, method, "none")
    assert (status, out) == (143, ""), err
    assert torch.equal(pushed(server), torch.full((ENTRIES,), -3.0))


def test_a_script_that_ignores_it_is_not_ended_and_nothing_is_closed(server):
    status, out, err = run(server, "dropping", "ignores")
    assert (status, out) == (0, "ended by itself False\n"), err
    assert "SIGTERM" not in err


# Handlers that are none of Python's

PRELOADED = """
#include <signal.h>
#include <unistd.h>
static void handle(int number) { (void)number; if (write(1, "from C\\n", 7) < 0) _exit(9); }
__attribute__((constructor)) static void begin(void) { signal(SIGTERM, handle); }
"""

EMBEDDED = """
import os, signal, sys, torch, psclient
assert signal.getsignal(signal.SIGTERM) is None
w = torch.nn.Parameter(torch.zeros(10))
with psclient.ASGD([w], lr=1.0, server=sys.argv[1]) as optimizer:
    os.kill(os.getpid(), signal.SIGTERM)
    w.grad = torch.ones(10)
    optimizer.step()
os.kill(os.getpid(), signal.SIGTERM)
print("ended by itself", flush=True)
"""


@pytest.mark.long
@pytest.mark.executes_python
def test_a_handler_from_c_is_left_alone(server, tmp_path):
    (tmp_path / "handler.c").write_text(PRELOADED)
    library = tmp_path / "handler.so"
    built = subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "handler.c"], capture_output=True)
    assert built.returncode == 0, built.stderr
    program = ["env", f"LD_PRELOAD={library}", sys.executable, "-c", EMBEDDED, server.server]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "from C\nfrom C\nended by itself\n"), done.stderr


# The whole job

GROUP = """
import sys, torch, psclient
from torch import nn

class Ones(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return torch.ones(1)

layer = nn.Linear(1, 1000, bias=False)
nn.init.zeros_(layer.weight)
settings = psclient.ClientSettings(dense_below=0)
joined = {"model": layer, "server": sys.argv[1], "worker": "w", "settings": settings}
if sys.argv[2] == "outer":
    optimizer = psclient.Outer(torch.optim.SGD(layer.parameters(), lr=1.0), None, sync_every=100_000, **joined)
else:
    optimizer = psclient.GradientDropping(layer.parameters(), lr=1.0, density=0.01, **joined)
for batch in torch.utils.data.DataLoader(Ones(), batch_size=4, num_workers=2):
    optimizer.zero_grad()
    layer(batch).sum().backward()
    optimizer.step()
    print("stepped", flush=True)
"""


@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.parametrize("method", long_but(["dropping"], ["dropping", "outer"]))
def test_a_signal_to_the_whole_job_with_its_loader_processes_loses_nothing(server, method, signals):
    program = [sys.executable, "-c", GROUP, server.server, method]
    job = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    for _ in range(3):
        assert job.stdout.readline() == "stepped\n", job.stderr.read()
    for _ in range(signals):
        os.killpg(job.pid, signal.SIGTERM)
    out, err = job.communicate(timeout=100)
    assert job.returncode == 143, err
    moved = pushed_weight(server)
    assert torch.equal(moved, torch.full_like(moved, moved[0, 0].item())), "no entry lacks a step"
    assert -moved[0, 0].item() >= 4 * (3 + len(out.splitlines()))


ENDING = """
import os, signal, sys, torch, psclient
def fail(*_): raise RuntimeError("a loader has ended")
signal.signal(signal.SIGCHLD, fail)  # as a DataLoader with processes does
layer = torch.nn.Linear(4, 4, bias=False)
optimizer = psclient.ASGD(layer.parameters(), lr=1.0, model=layer, server=sys.argv[1])
print("begins", flush=True)
try:
    while True:
        optimizer.zero_grad()
        layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()
finally:
    os.kill(os.getpid(), signal.SIGCHLD)
"""


def test_a_loader_that_ends_at_the_same_signal_does_not_change_the_status(server):
    job = subprocess.Popen([sys.executable, "-c", ENDING, server.server], stdout=subprocess.PIPE, text=True)
    assert job.stdout.readline() == "begins\n"
    job.terminate()
    job.communicate(timeout=100)
    assert job.returncode == 143


def pushed_weight(server):
    return psclient.download(server.server)["weight"]


# The end off the main thread


def test_an_optimizer_is_closed_from_any_thread_and_its_server_stops():
    before = signal.getsignal(signal.SIGTERM)
    w = torch.nn.Parameter(torch.zeros(10))
    optimizer = psclient.ASGD([w], lr=1.0, settings=QUICK)
    (process,) = own_server(optimizer).processes
    errors = []

    def close():
        try:
            optimizer.close()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert errors == []
    assert process.poll() == 0
    with LocalServer() as server, psclient.ASGD([w], lr=1.0, server=server, settings=QUICK):
        pass
    assert signal.getsignal(signal.SIGTERM) == before, "the next end in the main thread restores the handler"


CLOSED_ELSEWHERE = """
import os, signal, sys, threading, torch, psclient
optimizer = psclient.ASGD([torch.nn.Parameter(torch.zeros(10))], lr=1.0, server=sys.argv[1])
thread = threading.Thread(target=optimizer.close)
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGTERM)
signal.pause()
"""


def test_without_a_worker_sigterm_does_what_it_did_before(server):
    done = subprocess.run([sys.executable, "-c", CLOSED_ELSEWHERE, server.server], capture_output=True, timeout=100)
    assert done.returncode == -signal.SIGTERM

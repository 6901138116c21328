"""Several worker processes at once, while servers are stopped: nothing lost, nothing doubled, replicas equal."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

import psclient
from psclient.rpc.local_server import LocalServer

# Accumulates every gradient that the optimizer has taken in, and says at the end what it has moved and what it holds.
WORKER = """
import sys, torch, psclient
from psclient.errors import ServerUnreachableError
from psclient.settings import ClientSettings
from tests.system.tools import engine_of
server, name, steps, out = sys.argv[1:5]
torch.set_num_threads(1)
torch.manual_seed(int(name[1:]))
parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2000,), (3, 4), ())]
settings = ClientSettings(deadline_seconds=1, patience_seconds=1.5, connect_seconds=30, dense_below=10)
optimizer = psclient.GradientDropping(parameters, lr=1.0, density=0.02, server=server, worker=name, settings=settings)
print("ready", flush=True)
total = [torch.zeros_like(p) for p in parameters]
while engine_of(optimizer).number < int(steps):
    before = engine_of(optimizer).number
    for p in parameters:
        p.grad = torch.randn(p.shape)
    try:
        optimizer.step()
    except ServerUnreachableError:
        pass
    if engine_of(optimizer).number > before:  # else an earlier push was in doubt, and this gradient was not taken in
        for p, t in zip(parameters, total):
            t += p.grad
def settled_pull():
    while True:
        try:
            return optimizer.pull()
        except ServerUnreachableError:
            pass
settled_pull()
held = [optimizer.state[p]["residual"].view(p.shape) for p in parameters]
print("done", flush=True)
sys.stdin.readline()
settled_pull()
torch.save({"moved": [t - h for t, h in zip(total, held)], "replica": [p.detach() for p in parameters]}, out)
optimizer.close()
"""


@pytest.mark.long
@pytest.mark.parametrize("shards", [1, 2])
def test_stopped_servers_lose_and_double_nothing(shards, tmp_path):
    random.seed(shards)
    with LocalServer(shards=shards, down_mode="exact", lease_seconds=30) as server:
        outs = [tmp_path / f"w{i}.pt" for i in range(3)]
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, server.server, f"w{i}", "300", str(out)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for i, out in enumerate(outs)
        ]
        assert [worker.stdout.readline() for worker in workers] == [
            "ready\n"
        ] * 3  # the first contact has its own patience
        for pause in (0.3, 2.0, 0.1, 2.0):  # shorter and longer than the workers' patience
            process = random.choice(server.processes)
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(pause)
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.5)
        assert [worker.stdout.readline() for worker in workers] == ["done\n"] * 3
        state = psclient.download(server.server)
        for worker in workers:
            worker.communicate("\n", timeout=60)
            assert worker.returncode == 0
        reports = [torch.load(out) for out in outs]
        for i, tensor in enumerate(state.values()):
            moved = sum(report["moved"][i] for report in reports)
            torch.testing.assert_close(tensor, -moved, rtol=1e-4, atol=1e-4)
            for report in reports:
                assert torch.equal(report["replica"][i], tensor)

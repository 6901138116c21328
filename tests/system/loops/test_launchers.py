"""Workers under ``torchrun``: each process is a worker with a name and a number, the same after a restart."""

import json
import os
import subprocess
import sys

import pytest

import psclient
from psclient.engine import lifecycle
from psclient.errors import WorkerAliveError
from tests.system.tools import make_model

SCRIPT = """
import json, os, signal, sys
import psclient
from tests.system.tools import make_data, make_model, train_step
model = make_model()
optimizer = psclient.ASGD(model.parameters(), lr=0.01, model=model)
train_step(model, optimizer, *make_data(seed=psclient.worker_index()))
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(json.dumps([attempt, optimizer.worker, psclient.worker_index()]), flush=True)
if attempt == 0 and optimizer.worker == "slurm-0-rank-1":
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == 0:
    signal.pause()
optimizer.close()
"""


def test_each_process_of_torchrun_is_a_worker_and_the_same_after_a_restart(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with psclient.LocalServer(lease_seconds=2) as server:
        environment = {
            "PSCLIENT_SERVER": server.server,
            "PYTHONPATH": os.getcwd(),
            "OMP_NUM_THREADS": "1",
            "SLURM_PROCID": "0",  # as under srun with one task a node
        }
        more = ["--max-restarts=1", str(script)]
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *more],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=180,
        )
    assert done.returncode == 0, done.stderr
    told = sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert [0, "slurm-0-rank-1", 1] in told
    assert told[-2:] == [[1, "slurm-0-rank-0", 0], [1, "slurm-0-rank-1", 1]]


def test_two_jobs_with_the_same_ranks_are_told_how_to_be_apart(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with psclient.LocalServer(lease_seconds=1) as server:
        model, other = make_model(), make_model()
        with psclient.ASGD(model.parameters(), lr=0.01, model=model, server=server):
            monkeypatch.setattr(lifecycle, "_claims", [])  # as in another process, which does not know the first
            with pytest.raises(WorkerAliveError, match=r'worker=f"second-\{psclient\.worker_index\(\)\}"'):
                psclient.ASGD(other.parameters(), lr=0.01, model=other, server=server)

"""Interrupts at random moments of joins, steps, pulls and closes: none hangs, and nothing counts twice."""

import json
import subprocess
import sys

import pytest

import psclient
from psclient.rpc.local_server import LocalServer
from tests.system.operating.asking import status
from tests.tiers import long_but

INTERRUPTS = 250


@pytest.mark.parametrize(
    ("overlap", "shards"),
    long_but([("plain", 1)], [("plain", 1), ("overlap", 1), ("plain", 2)]),
)
def test_a_worker_goes_on_after_each_of_many_interrupts(overlap, shards):
    with LocalServer(shards, down_mode="exact", lease_seconds=60) as server:
        program = [sys.executable, "-m", "tests.system.interrupted", server.server, str(INTERRUPTS), "7", overlap]
        worker = subprocess.run(program, capture_output=True, text=True, timeout=400)
        assert worker.returncode == 0, worker.stderr
        counts = json.loads(worker.stdout.splitlines()[-1])
        version = status(server).version
        weight = psclient.download(server.server)["weight"]
    moved = round(-weight[0, 0].item())
    assert counts["ended"] <= moved <= counts["begun"], "each batch moves the model by one, once"
    if overlap == "plain":  # with overlap a batch that is skipped after its backward pass goes with the next push
        assert moved == version

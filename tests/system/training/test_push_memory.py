"""What a dense push takes on the worker's host."""

import os
import subprocess
import sys

import pytest

from psclient.rpc.local_server import LocalServer

ELEMENTS = 40_000_000
SPARE = 40 << 20  # bytes of messages under way, of a piece that is encoded, and of what a first step of this size loads


@pytest.mark.executes_python  # a fork's C library does not read the variable again
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be reset here")
def test_a_dense_push_takes_at_most_one_and_a_half_times_its_bytes():
    at_once = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}  # what is freed does not count
    with LocalServer() as server:
        command = [sys.executable, "-m", "tests.system.dense_pusher", server.server, str(ELEMENTS), "fp32"]
        found = subprocess.run(command, check=True, capture_output=True, text=True, env=at_once).stdout
    push, kept, peak = map(int, found.split())
    assert kept == 0
    assert peak <= 1.5 * push + SPARE

"""A first start takes seconds for what later ones find done: it says so, and what was done is kept."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LIMIT_SECONDS = 900  # it compiles every loop, also on a machine with much else to do

TRAINING = """
import torch, psclient
model = torch.nn.Linear(128, 128)
with psclient.DGS(model.parameters(), lr=0.1, density=0.1, model=model, server="local") as optimizer:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 128)).square().mean().backward()
        optimizer.step()
"""


def train(cache, **options):
    """Train in a process of its own; return its lines about compiling."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", TRAINING],
        capture_output=True, text=True, env=environment, timeout=LIMIT_SECONDS, **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "compil" in line]


@pytest.mark.long
@pytest.mark.timeout(3 * LIMIT_SECONDS)
def test_a_training_finds_compiled_what_the_commands_compile_and_else_says_once_that_it_compiles(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path)}
    for package in ("psservice", "psclient"):
        command = [sys.executable, "-m", package, "compile"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_SECONDS)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
    compiled = sorted(tmp_path.rglob("*.nbc"))
    assert compiled
    assert train(tmp_path) == []
    assert sorted(tmp_path.rglob("*.nbc")) == compiled, "by worker and server"
    missing = list(tmp_path.rglob("update_loops.first_not_finite*"))  # which takes least to compile
    for path in missing:
        path.unlink()
    told = train(tmp_path)
    assert "kept for the next start" in told[0]
    assert all("so far" in line for line in told[1:]), told
    assert train(tmp_path) == [], "what a training compiles is kept"


def test_serve_says_at_a_terminal_that_it_loads_and_then_which_settings_are_not_the_defaults():
    terminal, inside = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "psservice", "serve", "--listen=127.0.0.1:0", "--health-listen=", "--metrics-listen="],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=inside, stderr=inside,
    )  # fmt: skip
    os.close(inside)
    try:
        with os.fdopen(terminal, errors="replace") as lines:
            assert "loading" in lines.readline()
            serving = lines.readline()
        assert "serving" in serving
        assert "settings={'listen': '127.0.0.1:0', 'health_listen': '', 'metrics_listen': ''}" in serving
    finally:
        process.terminate()
        process.wait(LIMIT_SECONDS)

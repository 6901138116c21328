"""The loops of other people's libraries, and what the pages show of them."""

import re
import subprocess
import sys

import pytest

from psclient.rpc.local_server import LocalServer
from tools import run_loops
from tools.run_loops import LOOPS

PAGES = sorted(page for page in run_loops.FOLDER.glob("*.md") if page.name != "README.md")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_loop_trains_the_servers_model(tmp_path, monkeypatch):
    """The way that ``make examples QUICK=1`` leaves out, and the full form takes for each loop."""
    loop = next(loop for loop in LOOPS if loop.name == "hf_trainer")
    if loop.missing:
        pytest.skip(f"{', '.join(loop.missing)} not installed: pip install '.[loops]'")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(run_loops, "SLOWEST_SECONDS", 180.0)
    try:
        run_loops.fresh(loop, tmp_path / "out")
    except run_loops.ExampleFailedError as error:
        logs = "\n".join(f"{log}:\n{log.read_text()[-3000:]}" for log in tmp_path.rglob("log"))
        pytest.fail(f"{error}\n{logs}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_difference_that_a_page_shows_is_in_its_script(page):
    script = page.with_suffix(".py").read_text().splitlines()
    shown = "".join(re.findall(r"```diff\n(.*?)```", page.read_text(), re.DOTALL)).splitlines()
    assert any(line.startswith("-") for line in shown)
    assert [line for line in shown if line.strip("+-") and line[1:] not in script] == []


@pytest.mark.long
@pytest.mark.timeout(200)
def test_the_processes_of_torchrun_are_one_worker_of_the_loop_like_nanogpts(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    with LocalServer() as server:
        script = [run_loops.FOLDER / "nanogpt.py", "--epochs", "1", "--server", server.server, "--out", tmp_path]
        command = [*torchrun, "--nproc-per-node", "2", *map(str, script)]
        environment = run_loops.environment()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("in the end") == 1
        run_loops.require_same(server.server, tmp_path)

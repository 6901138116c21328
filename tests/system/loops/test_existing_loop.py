"""An ordinary script before and after: both learn, and the page shows what was changed."""

import difflib
import runpy
import sys

import pytest
import torch

import psclient
from psclient.errors import ServerUnreachableError
from psclient.rpc.local_server import LocalServer
from tests.system.scripts import EXAMPLES, accuracies, run_example

FOLDER = EXAMPLES / "loops"
ENOUGH = 0.85  # after an epoch; ten digits


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs a script in this process, which is faster; returns what it prints."""

    def run(name, *arguments):
        options = [*map(str, arguments), "--checkpoint", str(tmp_path / "digits.pt")]
        monkeypatch.setattr(sys, "argv", [name, *options])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_the_page_shows_the_difference_of_the_scripts():
    before, after = ((FOLDER / name).read_text().splitlines() for name in ("before.py", "after.py"))
    lines = difflib.unified_diff(before, after, "before.py", "after.py", n=1, lineterm="")
    difference = "\n".join(line.rstrip() for line in lines)
    page = (FOLDER / "README.md").read_text()
    assert f"```diff\n{difference}\n```" in page, f"the page should have:\n{difference}"


def test_before_learns(run):
    assert accuracies(run("before.py", "--epochs", 1))[-1] > ENOUGH


@pytest.mark.long
def test_after_learns_with_a_server_of_its_own(tmp_path):
    output = run_example("loops/after.py", "--epochs", 1, "--server", "local", "--checkpoint", tmp_path / "digits.pt")
    assert accuracies(output)[-1] > ENOUGH


def test_after_joins_a_server_and_goes_on_from_a_checkpoint(run, tmp_path, monkeypatch):
    with LocalServer() as server:
        assert "epoch 1" in run("after.py", "--epochs", 1, "--server", server.server)
        monkeypatch.setenv("PSCLIENT_SERVER", server.server)
        output = run("after.py", "--epochs", 2, "--resume")
        assert "epoch 1" not in output
        assert accuracies(output)[-1] > ENOUGH
        trained, served = torch.load(tmp_path / "digits.pt")["model"], psclient.download(server.server)
        for name in ("0.weight", "3.bias", "7.weight", "9.bias"):
            assert torch.equal(trained[name], served[name]), name


def test_after_leaves_when_the_server_ends_the_run(run):
    with LocalServer(end_versions=10) as server:
        assert run("after.py", "--epochs", 3, "--server", server.server).count("epoch") == 1
        assert "epoch" not in run("after.py", "--epochs", 3, "--server", server.server)


def test_after_says_that_there_is_no_server(run, monkeypatch):
    monkeypatch.setenv("PSCLIENT_CONNECT_SECONDS", "0.5")
    with pytest.raises(ServerUnreachableError, match="Start the server first"):
        run("after.py", "--server", "127.0.0.1:1")

"""A fleet of processes on elastic data: one is killed, one comes late, the server dies too, and the books agree."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from psclient.rpc.local_server import LocalServer
from tests.system.tools import wait_until

SAMPLES, EPOCHS = 320, 2


class Process:
    """A worker of ``elastic_worker``, and what its book says."""

    def __init__(self, server: LocalServer, folder: Path, name: str, pause_seconds: float) -> None:
        self.book = folder / name
        arguments = [server.server, name, str(SAMPLES), str(EPOCHS), str(pause_seconds), str(self.book)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.system.elastic_worker", *arguments], stdin=subprocess.PIPE, text=True
        )

    @property
    def lines(self) -> list[str]:
        return self.book.read_text().splitlines() if self.book.exists() else []

    @property
    def done(self) -> int:
        return sum(line.startswith('["done') for line in self.lines)

    def go(self) -> None:
        wait_until(lambda: "ready" in self.lines, 60)
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def trained(self) -> tuple[Counter, set]:
        """(epoch, sample) of the steps that have ended, and of the one that had begun last."""
        found, begun = Counter(), []
        for line in self.lines:
            if line.startswith('["try'):
                _, epoch, index = json.loads(line)
                begun = [(epoch, sample) for sample in index]
            elif line.startswith('["done'):
                found.update(begun)
                begun = []
        return found, set(begun)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_sample_is_trained_once_an_epoch_while_workers_come_go_and_die(tmp_path):
    with LocalServer(down_mode="exact", data_dir=tmp_path / "data", lease_seconds=4) as server:
        speeds = {"quick": 0.05, "slow": 0.2, "victim": 0.05, "late": 0.05}
        fleet = {name: Process(server, tmp_path, name, pause) for name, pause in speeds.items()}
        try:
            for name in ("slow", "victim", "quick"):
                fleet[name].go()
            wait_until(lambda: fleet["victim"].done >= 4)
            fleet["victim"].process.kill()
            fleet["late"].go()
            wait_until(lambda: fleet["late"].done >= 4)
            server.processes[0].kill()
            server.restart()
            for name in ("quick", "slow", "late"):
                assert fleet[name].process.wait(60) == 0
        finally:
            for each in fleet.values():
                each.end()
        trained, interrupted = Counter(), set()
        for each in fleet.values():
            found, begun = each.trained()
            trained += found
            interrupted |= begun
        expected = {(epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES)}
        assert set(trained) <= expected
        assert [twice for twice, times in trained.items() if times > 1] == []
        assert expected - set(trained) <= interrupted  # applied, and the victim died before it could say so
        assert fleet["quick"].done > fleet["slow"].done > 0

"""Shards and standbys that are commands of their own, as pods are: each standby follows the shard of its number."""

import subprocess
import sys
from contextlib import ExitStack, contextmanager

import pytest

from psservice.cli.main import main
from tests.system.serving import free_ports
from tests.system.standby.standby_tools import CountingWorker, counted

pytestmark = pytest.mark.timeout(300)


@contextmanager
def command(kind, folder, address, number, coordinator, *flags):
    place = ["--listen", address, "--num-shards", "2", "--shard-index", str(number), "--coordinator", coordinator]
    words = [sys.executable, "-m", "psservice", kind, *place, "--data-dir", str(folder / f"{kind}-{number}"), *flags]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_all_shards_are_lost_and_their_standbys_have_every_push(tmp_path):
    shards, standbys = ([f"127.0.0.1:{port}" for port in ports] for ports in (free_ports(2), free_ports(2)))
    coordinator, of = f"{shards[0]}/{standbys[0]}", ",".join(shards)
    with ExitStack() as running:
        primaries = [
            running.enter_context(command("serve", tmp_path, address, number, coordinator, "--replicate", "ack"))
            for number, address in enumerate(shards)
        ]
        for number, address in enumerate(standbys):
            running.enter_context(command("standby", tmp_path, address, number, coordinator, "--of", of))
        worker = CountingWorker(",".join(map("/".join, zip(shards, standbys, strict=True))), "w")
        for _ in range(20):
            worker.step()
        for process in primaries:
            process.kill()
            process.wait()
        assert main(["promote", *standbys]) == 0
        for _ in range(20):
            worker.step()
        worker.optimizer.flush()
        assert counted(",".join(standbys)) == worker.steps == 40
        worker.close()

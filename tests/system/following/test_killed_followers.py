"""A follower of a directory that is killed at any moment leaves one whole version, and goes on from it."""

import random
import subprocess
import sys
import time

import pytest
import torch

from psclient import LocalServer
from psclient.reader.directory_sink import INDEX
from tests.system.following.following_tools import SECONDS, loaded, training
from tests.system.scripts import marked
from tests.system.tools import wait_until


@pytest.mark.parametrize("kills", [4, pytest.param(12, marks=pytest.mark.long)])
def test_kills_leave_a_whole_version_of_those_that_were(kills, tmp_path):
    draw, environment = random.Random(7), marked()[0]
    with LocalServer(shards=2, cut_seconds=0.001) as server, training(server) as run:
        run.steps()
        versions = []
        for _ in range(kills):
            command = [sys.executable, "-m", "psclient", "follow", *server.addresses, "--out", str(tmp_path)]
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            wait_until(lambda: (tmp_path / INDEX).exists(), SECONDS)
            before = loaded(tmp_path)[0]["version"]
            end = time.monotonic() + draw.uniform(0.0, 0.3)
            while time.monotonic() < end or (versions and loaded(tmp_path)[0]["version"] == before == versions[-1]):
                run.steps()
            process.kill()
            process.wait()
            about, found = loaded(tmp_path)
            first, second = (shard[1] for shard in about["shards"])
            # One worker: a shard may be a push ahead of the other, and no tensor is cut by the shards' border but one.
            for name, value in found.items():
                if name in run.versions[first]:
                    candidates = [run.versions[each][name] for each in {first, second}]
                    mixed = torch.stack([candidate == value for candidate in candidates]).any(0)
                    assert bool(mixed.all()), (name, about)
            versions.append(about["version"])
        assert versions == sorted(versions)
        assert len(set(versions)) > kills // 2

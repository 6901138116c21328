"""The data directory of a running server is removed: the server says so at once, and acknowledges nothing more."""

import json
import shutil

import pytest
import torch

import psclient
from psclient import LocalServer
from psclient.errors import ServerUnreachableError
from psclient.settings import ClientSettings
from tests.system.operating.asking import metric, status
from tests.system.tools import wait_until

LIMITS = {"deadline_seconds": 3, "connect_seconds": 10, "patience_seconds": 2}


def step(optimizer, w):
    optimizer.zero_grad()
    w.sum().backward()
    optimizer.step()


@pytest.mark.parametrize("gone", ["", "shard-0-of-1/journal"])
def test_a_directory_that_is_removed_is_told_of_and_pushes_are_refused(gone, tmp_path):
    log, data = tmp_path / "log", tmp_path / "data"
    settings = {"data_dir": data, "log_format": "json", "log_level": "info", "fsync_interval_seconds": 60}
    with log.open("w") as stream, LocalServer(log_to=stream, **settings) as server:
        w = torch.nn.Parameter(torch.zeros(8))
        with psclient.ASGD([w], lr=0.1, server=server.server, settings=ClientSettings(**LIMITS)) as optimizer:
            step(optimizer, w)
            assert metric(server.metrics_addresses[0], "psservice_durable") == 1
            shutil.rmtree(data / gone)
            wait_until(lambda: metric(server.metrics_addresses[0], "psservice_durable") == 0)
            assert not status(server.addresses[0]).durable
            with pytest.raises(ServerUnreachableError, match="no longer"):
                step(optimizer, w)
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert [line for line in lines if line["level"] == "ERROR" and str(data) in json.dumps(line)]
    assert "the journal has everything" not in log.read_text()


def test_without_a_journal_too(tmp_path):
    data = tmp_path / "data"
    with LocalServer(data_dir=data, durability="snapshot") as server:
        w = torch.nn.Parameter(torch.zeros(8))
        with psclient.ASGD([w], lr=0.1, server=server.server, settings=ClientSettings(**LIMITS)) as optimizer:
            step(optimizer, w)
            assert metric(server.metrics_addresses[0], "psservice_durable") == 1
            shutil.rmtree(data)
            wait_until(lambda: metric(server.metrics_addresses[0], "psservice_durable") == 0)


@pytest.mark.parametrize("durability", ["journal", "snapshot"])
def test_a_backup_that_is_put_in_its_place_is_told_of_and_stays_as_it_was(durability, tmp_path):
    data, backup = tmp_path / "data", tmp_path / "backup"
    with LocalServer(data_dir=data, durability=durability) as server:
        w = torch.nn.Parameter(torch.zeros(8))
        with psclient.ASGD([w], lr=0.1, server=server.server, settings=ClientSettings(**LIMITS)) as optimizer:
            step(optimizer, w)
            shutil.copytree(data, backup)
            before = files_of(backup)
            data.rename(tmp_path / "old")
            backup.rename(data)
            wait_until(lambda: metric(server.metrics_addresses[0], "psservice_durable") == 0)
            if durability == "journal":
                with pytest.raises(ServerUnreachableError, match="replaced"):
                    step(optimizer, w)
            else:
                step(optimizer, w)
    assert files_of(data) == before


def files_of(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}

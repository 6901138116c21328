"""Servers that run out of disk or of file descriptors, by real limits of the system: what comes back when they end."""

import contextlib
import resource
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import psclient
from psclient.rpc.local_server import LocalServer
from pscore.model import modelfile
from psservice.cli.main import main
from tests.system.tools import QUICK, run_of, train_step, wait_until

ROOM_BYTES = 256 << 10
"""Of a file: records of pushes fit, and no snapshot of the model does."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(400, 400)


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 400, generator=generator), torch.randint(400, (8,), generator=generator)


@contextlib.contextmanager
def limited(server: LocalServer, limit: int, soft: int) -> Iterator[None]:
    """Give the server's process a limit, and take it away at the end."""
    pid = server.processes[0].pid
    before = resource.prlimit(pid, limit)
    resource.prlimit(pid, limit, (soft, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, limit, before)


def metric(server: LocalServer, name: str) -> float:
    with urllib.request.urlopen(f"http://{server.metrics_addresses[0]}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


@contextlib.contextmanager
def training(tmp_path: Path, **settings: object) -> Iterator[tuple[LocalServer, psclient.DGS, nn.Module]]:
    """One server with a data directory, and a worker at its third step."""
    with (
        (tmp_path / "log").open("w") as log,
        LocalServer(data_dir=tmp_path / "data", log_to=log, down_mode="exact", **settings) as server,
    ):
        model = make_model()
        with psclient.DGS(
            model.parameters(), lr=0.05, density=0.01, model=model, server=server.server, settings=QUICK, worker="w"
        ) as optimizer:
            for _ in range(3):
                train_step(model, optimizer, *make_data())
            yield server, optimizer, model


def log_of(tmp_path: Path) -> str:
    return (tmp_path / "log").read_text()


def test_snapshots_go_on_when_a_full_disk_has_room_again(tmp_path):
    with training(tmp_path, snapshot_seconds=0.2) as (server, optimizer, model):
        with limited(server, resource.RLIMIT_FSIZE, ROOM_BYTES):
            for failed in (1, 2, 3):  # the first ends nothing
                train_step(model, optimizer, *make_data())
                wait_until(lambda failed=failed: metric(server, "psservice_snapshot_errors_total") >= failed)
            assert main(["checkpoint", "create", server.addresses[0]]) != 0
            assert optimizer.version == 6
        assert "no snapshot could be taken" in log_of(tmp_path)
        assert "File too large" in log_of(tmp_path)
        wait_until(lambda: metric(server, "psservice_snapshot_version") == 6)
        assert main(["checkpoint", "create", server.addresses[0]]) == 0
        assert not list((tmp_path / "data").glob("*/snapshots/.*"))


def test_the_final_model_is_written_when_a_full_disk_has_room_again(tmp_path, capsys):
    path = tmp_path / "final.safetensors"
    modelfile.write(path, {"of": torch.zeros(1)}, {"run_id": "another run"})
    with training(tmp_path, final_model=path) as (server, optimizer, _):
        with limited(server, resource.RLIMIT_FSIZE, ROOM_BYTES):
            assert main(["finish", server.addresses[0]]) == 0
            assert str(path) not in capsys.readouterr().out
            assert "final model could not be written" in log_of(tmp_path)
        assert main(["finish", server.addresses[0]]) == 0
        assert str(path) in capsys.readouterr().out
        assert modelfile.read_metadata(path)["version"] == str(optimizer.version)
        assert "Traceback" not in log_of(tmp_path)


def test_a_full_disk_is_logged_when_it_begins_and_when_it_ends_and_not_for_each_push(tmp_path):
    def lines(part: str) -> int:
        return sum(part in line for line in log_of(tmp_path).splitlines())

    with training(tmp_path) as (server, optimizer, model):
        journal = max((tmp_path / "data").glob("*/journal/*"))
        with limited(server, resource.RLIMIT_FSIZE, journal.stat().st_size):
            membership = run_of(optimizer)
            patience = membership.settings
            membership.settings = patience.model_copy(update={"patience_seconds": 4.0})
            with pytest.raises(psclient.errors.ServerUnreachableError):
                train_step(model, optimizer, *make_data())
            assert metric(server, "psservice_journal_errors_total") >= 2
            assert lines("cannot be written down") == 1
        membership.settings = patience
        train_step(model, optimizer, *make_data())
        assert lines("can be written down again") == 1
        assert lines("cannot be written down") == 1


@pytest.mark.long
@pytest.mark.parametrize("fsync", ["always", "interval"])
def test_pushes_are_made_durable_where_no_file_descriptor_is_left(fsync, tmp_path):
    with training(tmp_path, fsync=fsync, fsync_interval_seconds=0.02) as (server, optimizer, model):
        taken = {int(entry.name) for entry in Path(f"/proc/{server.processes[0].pid}/fd").iterdir()}
        with limited(server, resource.RLIMIT_NOFILE, min({*range(len(taken) + 1)} - taken)):
            before, end = optimizer.version, time.monotonic() + 0.5
            while optimizer.version < before + 3 or time.monotonic() < end:
                train_step(model, optimizer, *make_data())
        version = optimizer.version
        server.processes[0].send_signal(signal.SIGKILL)
        server.restart()
        train_step(model, optimizer, *make_data())
        assert optimizer.version == version + 1
    assert "Exception in thread" not in log_of(tmp_path)

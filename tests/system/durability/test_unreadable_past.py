"""A past that this server cannot continue: the start and ``psservice replay`` say so in words, with the next step."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from psservice.observability.metrics import Metrics
from psservice.settings import ServerSettings
from psservice.shard.lifecycle import open_shard
from tests.psservice.service_makers import F32, layout_of
from tests.psservice.shard_makers import ANNA, HOUR, join, upload

TIMEOUT = 120.0
UPDATES = {
    "rule": ("rule_of_another_release", "no update rule 'rule_of_another_release'"),
    "optimizer": ("torch", "OptimizerOfAnotherTorch"),
}


def kept(directory: Path, update: str) -> Path:
    """A data directory whose snapshot has such a run."""
    settings = ServerSettings(lease_seconds=HOUR, snapshot_seconds=HOUR, data_dir=directory)
    shard = open_shard(settings, torch.device("cpu"), Metrics())
    layout = layout_of((8, F32))
    upload(shard, torch.zeros(8), ANNA, join(shard, layout).generation)
    shard.run.method_settings["update"] = update
    if update == "torch":
        shard.run.method_settings["optimizer"] = '{"name": "OptimizerOfAnotherTorch", "options": {}}'
    shard.durability.take("named")
    shard.close()
    return directory


def said_by(*words: object) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "psservice", *map(str, words)], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert run.returncode == 1, run.stderr
    assert "Traceback" not in run.stderr
    return run.stderr


@pytest.mark.parametrize("what", UPDATES)
def test_what_this_release_lacks_is_named_by_the_start_by_init_and_by_replay(tmp_path, what):
    update, named = UPDATES[what]
    data_dir = kept(tmp_path / "data", update)
    ports = "--listen=127.0.0.1:0", "--health-listen=", "--metrics-listen="
    commands = (
        ("serve", *ports, f"--data-dir={data_dir}"),
        ("serve", *ports, f"--data-dir={data_dir}", "--recover=last-good"),
        ("serve", *ports, f"--init={data_dir}"),
        ("replay", data_dir, "--out", tmp_path / "out.safetensors"),
        ("replay", data_dir, "--checkpoint", "named", "--out", tmp_path / "out.safetensors"),
    )
    for command in commands:
        said = said_by(*command)
        assert named in said, command
        assert "release" in said, command

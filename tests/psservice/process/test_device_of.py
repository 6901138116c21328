"""The device of a shard's parameters."""

import pytest
import torch

from psservice.process.server import StartError, device_of
from psservice.settings import ServerSettings


@pytest.mark.parametrize(
    ("gpus", "device", "shard", "found"),
    [
        (0, "auto", 1, "cpu"),
        (2, "cpu", 1, "cpu"),
        (1, "auto", 3, "cuda:0"),
        (2, "auto", 3, "cuda:1"),
        (4, "cuda", 3, "cuda:3"),
        (4, "cuda:2", 3, "cuda:2"),
    ],
)
def test_shards_take_turns_at_the_gpus_of_a_machine(gpus, device, shard, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    settings = ServerSettings(device=device, shard_index=shard, num_shards=4)
    assert device_of(settings) == torch.device(found)


@pytest.mark.parametrize(("gpus", "device"), [(0, "cuda"), (2, "cuda:2")])
def test_a_device_that_is_not_there_is_refused(gpus, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(StartError, match=f"device {device} is not there .{gpus} CUDA devices found.; use --device cpu"):
        device_of(ServerSettings(device=device))

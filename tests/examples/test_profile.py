"""The profile of a training step: what it says, writes and draws."""

import json
from argparse import Namespace

import pytest
import torch
from support import profile
from support.images import FolderImages
from support.smalldata import write_imagenet
from torch import nn

from tests.tiers import long_but


def options(out, method="dgs"):
    return Namespace(
        loader=None,
        loaders=1,
        model="linear",
        batch_size=4,
        image_size=64,
        precision="fp32",
        out=out,
        device="cpu",
        method=method,
        lr=0.1,
        momentum=None,
        weight_decay=0.0,
        density=None,
        budget=None,
        overlap=False,
        epochs=1,
        warmup_epochs=0.0,
        schedule="cosine",
    )


@pytest.mark.parametrize("method", long_but(["dgs"], ["dgs", "momentum-sgd"]))
def test_every_part_is_measured_written_and_drawn(tmp_path, monkeypatch, capsys, method):
    monkeypatch.setattr(profile.os, "cpu_count", lambda: 1)
    images = FolderImages(write_imagenet(tmp_path / "data", per_class=4, classes=2, size=80) / "train")
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    given = options(tmp_path / "out", method)
    assert profile.run(given, images, model, torch.device("cpu"), seconds=0.02) == 0
    found = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert all(0 < each["least"] <= each["median"] <= each["most"] for each in found["loaders"].values())
    assert "torchvision, 1 process" in found["loaders"]
    assert found["loader"] in found["loaders"]
    assert found["step_seconds"] > 0
    assert ("select" in found["step_phases"]) == (method == "dgs")
    assert (tmp_path / "out" / "profile.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "A run is bounded by" in said
    assert "forward and backward" in said


@pytest.mark.parametrize(
    ("loading", "computing", "step_seconds", "bound", "at_most"),
    [
        (100.0, 1000.0, 0.001, "the loader", 100.0),
        (1000.0, 100.0, 0.05, "forward and backward", 10 / 0.15),
        (1000.0, 1000.0, 0.19, "the optimizer's step()", 10 / 0.2),
    ],
)
def test_the_slowest_part_bounds_the_run(loading, computing, step_seconds, bound, at_most):
    found = {"batch_size": 10, "loader": "it", "loaders": {"it": {"median": loading}}, "step_seconds": step_seconds}
    said = profile.judge(found | {"forward_backward": {"median": computing}})
    assert said["bound"] == bound
    assert said["at_most"] == pytest.approx(at_most)


def test_a_rate_leaves_out_the_warm_up(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(profile.time, "perf_counter", lambda: clock[0])
    spent = iter([9.0, 9.0, 0.5, 0.5, 1.0, 2.0, 4.0, 0.25, 0.25, 0.25, 0.25])

    def batch():
        clock[0] += next(spent)
        return 8

    found = profile.rate(batch, warm_up=2, seconds=1.0)
    assert (found.least, found.median, found.most) == (2.0, 8.0, 32.0)

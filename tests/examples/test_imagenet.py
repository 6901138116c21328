"""examples/imagenet.py as a user runs it: a whole run that is killed and resumed, and what it refuses."""

import os
import sys
from pathlib import Path

import imagenet
import pytest
from support import launch
from support.smalldata import write_imagenet

SCRIPT = Path(imagenet.__file__)
MODEL = ("--model", "shufflenet_v2_x0_5", "--image-size", "64", "--device", "cpu")
SMALL = (*MODEL, "--batch-size", "6", "--loaders", "1")
SETTINGS = ("--epochs", "5", "--warmup-epochs", "0.5", "--workers", "2", "--lr", "0.02")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """24 images to train with and 8 to validate."""
    return write_imagenet(tmp_path_factory.mktemp("imagenet"), per_class=8, classes=4, size=80)


def said(monkeypatch, capsys, *arguments):
    """Run the script in this process; return its status and what it has printed."""
    monkeypatch.setattr(sys, "argv", ["imagenet.py", *map(str, arguments)])
    given = imagenet.parse()
    status = launch.guarded(lambda: imagenet.main(given))
    printed = capsys.readouterr()
    return status, printed.out + printed.err


@pytest.mark.long
def test_what_cannot_work_is_refused_before_anything_is_written(data, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"

    def refused(*arguments):
        status, words = said(monkeypatch, capsys, *arguments, "--out", out)
        assert status == 1
        assert not out.exists()
        return words

    assert "train-00000-of-01024" in refused(tmp_path / "nothing")
    assert "at least 64" in refused(data, "--image-size", "32")
    assert "at least 1" in refused(data, "--workers", "0")
    assert "no-model.safetensors" in refused(data, "--evaluate", tmp_path / "no-model.safetensors")
    (tmp_path / "text.safetensors").write_bytes(b"no model")
    assert "does not hold this model" in refused(data, *SMALL, "--evaluate", tmp_path / "text.safetensors")
    assert "Unknown model" in refused(data, "--model", "resnet51", "--evaluate", tmp_path / "text.safetensors")


def test_without_dali_the_other_loader_is_taken_and_dali_is_refused(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    assert imagenet.choose(None) == "torchvision"
    status, words = said(monkeypatch, capsys, data, "--loader", "dali", "--out", tmp_path / "run")
    assert (status, "--loader torchvision" in words) == (1, True)

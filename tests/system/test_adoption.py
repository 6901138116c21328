"""Hugging Face accelerate and Lightning around an optimizer of ours: what they train is the server's model."""

import importlib.util

import pytest
import torch
from safetensors.torch import load_file

import psclient
from psclient.local import LocalServer
from tests.system.scripts import accuracies, run_example

ENOUGH = 0.85
PARAMETERS = ("0.weight", "0.bias", "2.weight", "3.weight", "7.weight", "9.bias")


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture
def server():
    with LocalServer() as running:
        yield running.server


def assert_served(server, model):
    served = psclient.download(server)
    for name in PARAMETERS:
        assert torch.equal(model[name], served[name]), name


@needs("accelerate")
def test_accelerate_trains_saves_and_goes_on(server, tmp_path):
    options = ("--server", server, "--state", tmp_path, "--accumulate", 2)
    output = run_example("existing_loop/accelerate_loop.py", *options, "--epochs", 1, PSCLIENT_WORKER="one")
    assert accuracies(output)[-1] > ENOUGH
    assert "version 45, 1424 samples" in output, "89 batches of 16, two a step"
    assert_served(server, load_file(tmp_path / "model.safetensors"))

    output = run_example("existing_loop/accelerate_loop.py", *options, "--epochs", 2, "--resume", PSCLIENT_WORKER="one")
    assert "epoch 1" not in output
    assert "residuals" not in output, "none are lost"
    assert "written to" not in output
    assert_served(server, load_file(tmp_path / "model.safetensors"))


@needs("lightning")
def test_lightning_trains_saves_goes_on_and_ends_with_the_run(tmp_path):
    with LocalServer(end_versions=50) as server:
        options = ("--server", server.server, "--worker", "one", "--out", tmp_path)
        output = run_example("existing_loop/lightning_module.py", *options, "--epochs", 1, "--precision", "bf16-mixed")
        assert accuracies(output)[-1] > ENOUGH
        assert "version 44, 1408 samples" in output
        saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
        assert saved["optimizer_states"][0]["state"], "the residuals are in the checkpoint"
        model = {name.removeprefix("net."): value for name, value in saved["state_dict"].items()}
        assert_served(server.server, model)

        options += ("--epochs", 3, "--resume", "--accumulate", 2)
        output = run_example("existing_loop/lightning_module.py", *options)
        assert "residuals" not in output, "none are lost"
        assert "version 50, 384 samples" in output

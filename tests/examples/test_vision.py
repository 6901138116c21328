"""torchvision works beside a torch that its operators do not fit."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cifar10 import make_model
from support.evaluation import ServersModel, load_saved
from support.launch import Place

from tests.tiers import long_but

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_models_datasets_and_transforms_work_in_a_fresh_process():
    script = (
        "from support.vision import torchvision; import torch; from torchvision.transforms import v2; "
        "m = torchvision.models.resnet18(); print(tuple(m(torch.zeros(1, 3, 64, 64)).shape)); "
        "print(v2.RandomResizedCrop(8)(torch.zeros(3, 16, 16)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=EXAMPLES, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["(1, 1000)", "torch.Size([3, 8, 8])"]


def test_an_operator_that_is_only_declared_is_an_error_when_it_is_called():
    from support import vision

    if vision._declared is None:
        pytest.skip("torch and torchvision belong together here")
    with pytest.raises((NotImplementedError, RuntimeError)):
        vision.torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)


@pytest.mark.parametrize(
    "name", long_but(["resnet18"], ["resnet18", "densenet121", "squeezenet1_1", "mnasnet0_5", "shufflenet_v2_x0_5"])
)
def test_a_saved_model_loads_into_the_plain_module(tmp_path, name):
    torch.manual_seed(0)
    model = make_model(name, 10).eval()
    place = Place("", "worker-0", 0, 1, torch.device("cpu"), tmp_path, False)
    alone = torch.optim.SGD(model.parameters(), lr=0.1)  # has no server: the model's own values
    servers_model = ServersModel(model, alone, place)
    servers_model.save(tmp_path / "model.safetensors")
    torch.manual_seed(1)
    again = load_saved(make_model(name, 10), tmp_path / "model.safetensors").eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(again(images), model(images))
        assert torch.equal(servers_model.fetch()(images), model(images))
        assert again(images).shape == (2, 10)

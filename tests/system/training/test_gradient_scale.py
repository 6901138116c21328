"""A method that scales all gradients of a step, as DGC does when it clips, is heeded, whichever it is made from."""

import pytest
import torch
from torch import nn

import psclient
from tests.system.tools import QUICK
from tests.tiers import long_but

METHODS = {
    "asgd": (psclient.ASGD, {"lr": 1.0}),
    "gradient_dropping": (psclient.GradientDropping, {"lr": 1.0, "density": 1.0}),
    "dgs": (psclient.DGS, {"lr": 1.0, "density": 1.0}),
    "dgc": (psclient.DGC, {"lr": 1.0, "density": 1.0}),
    "ssgd": (psclient.SSGD, {"lr": 1.0}),
    "ssgd sparse": (psclient.SSGD, {"lr": 1.0, "density": 0.99}),
    "server optimizer": (psclient.ServerOptimizer, {"optimizer": "SGD", "options": {"lr": 1.0}}),
}


@pytest.mark.parametrize("dtype", long_but([torch.bfloat16], [torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_heeds_the_scale_of_its_gradients(name, dtype):
    method, options = METHODS[name]
    scaled = type("Scaled", (method,), {"_gradient_scale": lambda self, gradients, live_workers: 0.25})
    w = nn.Parameter(torch.zeros(50, dtype=dtype))
    with (
        psclient.LocalServer(down_mode="exact") as server,
        scaled([w], **options, server=server, settings=QUICK) as optimizer,
    ):
        w.grad = torch.full_like(w, 2.0)
        optimizer.step()
        optimizer.pull()
        assert torch.equal(w.grad, torch.full_like(w, 2.0)), "the gradient is the script's"
        moved = -w.detach().float()
        assert moved.max().item() == 0.5
        assert moved[moved != 0].min().item() == 0.5

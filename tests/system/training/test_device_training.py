"""Training whose worker selects and applies replies by the kernels of a device, in Triton's interpreter."""

import functools
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

import psclient
from psclient.engine import engine, home
from psclient.rpc.local_server import LocalServer
from pscore.selection.cuda.launches import DeviceKernels
from tests.system.tools import QUICK, make_data, make_model, train_step
from tests.tiers import long_but

STEPS = 8

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_cuda.py trains on the device itself")


@pytest.fixture
def launches(monkeypatch):
    """Have tensors of the host worked on by kernels; return what is launched."""
    kernels, found = DeviceKernels(torch.device("cpu"), block=1024, part=1024), []
    for name in ("launch", "scatter"):
        call = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *a, name=name, call=call, **kw: found.append((name, bool(kw))) or call(*a, **kw)
        )
    for module, name in ((engine, "Choice"), (home, "Replica")):
        made = functools.partial(getattr(module, name), on_device=lambda _: kernels)
        monkeypatch.setattr(module, name, made)
    return found


@pytest.mark.parametrize(
    ("down_mode", "overlap"),
    long_but([("topk", True)], product(("exact", "topk"), (False, True))),
)
def test_a_worker_trains_and_has_the_servers_model(down_mode, overlap, launches):
    settings = QUICK.model_copy(update={"dense_below": 100})
    with LocalServer(down_mode=down_mode, down_density=0.2) as server:
        model = make_model(batch_norm=False)
        with psclient.DGS(
            model.parameters(), lr=0.5, momentum=0.5, density=0.2, model=model, server=server, settings=settings,
            overlap=overlap,
        ) as optimizer:  # fmt: skip
            x, y = make_data()
            losses = [train_step(model, optimizer, x, y) for _ in range(STEPS)]
            optimizer.pull()
            steps = [entry for entry in launches if entry[0] == "launch"]
            assert len(steps) <= STEPS + 12, "a launch a step, and searches while thresholds settle"
            assert ("scatter", True) in launches
            if down_mode == "exact":
                state = psclient.download(server.server)
                for name, parameter in model.named_parameters():
                    assert torch.equal(parameter.detach(), state[name]), name
    assert losses[-1] < 0.8 * losses[0]

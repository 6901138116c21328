"""The same promises with the model, the server or both on a GPU."""

import pytest
import torch

import psclient
from psclient.local import LocalServer
from tests.system.tools import QUICK, make_data, make_model, train_step

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("down_mode", ["exact", "topk"])
@pytest.mark.parametrize(("server_device", "worker_device"), [("cuda", "cuda"), ("cpu", "cuda"), ("cuda", "cpu")])
def test_training_on_devices(server_device, worker_device, down_mode):
    with LocalServer(device=server_device, down_mode=down_mode, down_density=0.1) as server:
        models = [make_model(i).to(worker_device) for i in range(2)]
        optimizers = [
            psclient.DGS(
                m.parameters(), lr=0.05, momentum=0.5, density=0.1, model=m, server=server, worker=f"w{i}",
                settings=QUICK,
            )
            for i, m in enumerate(models)
        ]  # fmt: skip
        x, y = (tensor.to(worker_device) for tensor in make_data())
        losses = [train_step(models[step % 2], optimizers[step % 2], x, y) for step in range(100)]
        assert losses[-1] < 0.6 * losses[0]
        if down_mode == "exact":
            state = psclient.download(server.server)
            for name, parameter in models[1].named_parameters():
                assert torch.equal(parameter.detach().cpu(), state[name]), name

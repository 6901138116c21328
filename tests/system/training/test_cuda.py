"""The same promises with the model, the server or both on a GPU."""

from contextlib import contextmanager

import pytest
import torch

import psclient
from psclient.errors import ModelChangedError
from psclient.rpc.local_server import LocalServer
from pscore.select.kernels import reference
from pscore.select.kernels.base import GradientUpdate
from pscore.select.kernels.cuda import DeviceSelection
from tests.pscore.kernel_makers import sift
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


@pytest.mark.parametrize("kind", ["adam", "lazy", "rounds", "compensated", "outer", "wagma"])
def test_every_update_rule_on_a_device_and_after_a_restart(kind, tmp_path):
    def make(m, server):
        shared = {"model": m, "server": server, "settings": QUICK}
        if kind == "outer":
            step = ("SGD", {"lr": 0.7, "momentum": 0.5, "nesterov": True})
            return psclient.Outer(torch.optim.Adam(m.parameters(), lr=0.01), step, sync_every=2, density=0.5, **shared)
        if kind in ("adam", "lazy"):
            sparse = {"density": 0.1, "lazy": True} if kind == "lazy" else {}
            return psclient.ServerOptimizer(m.parameters(), "Adam", {"lr": 0.01}, **sparse, **shared)
        if kind == "wagma":
            return psclient.WAGMA(m.parameters(), lr=0.05, momentum=0.5, **shared)
        rounds = psclient.Rounds() if kind == "rounds" else None
        return psclient.DGS(m.parameters(), lr=0.05, momentum=0.5, density=0.2, rounds=rounds, **shared)

    compensation = 0.04 if kind == "compensated" else 0.0
    model = make_model(batch_norm=False).cuda()
    x, y = (tensor.cuda() for tensor in make_data())
    options = {"device": "cuda", "data_dir": tmp_path, "delay_compensation": compensation, "down_mode": "exact"}
    with LocalServer(**options) as server, make(model, server) as optimizer:
        losses = [train_step(model, optimizer, x, y) for _ in range(30)]
        server.processes[0].kill()
        server.restart()
        losses += [train_step(model, optimizer, x, y) for _ in range(30)]
        optimizer.pull()
        state = psclient.download(server.server)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.detach().cpu(), state[name]), name
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_model_that_is_moved_is_said_and_may_come_back(overlap):
    with LocalServer(down_mode="exact") as server:
        model = make_model()
        options = {"density": 0.1, "model": model, "server": server, "settings": QUICK, "overlap": overlap}
        with psclient.DGS(model.parameters(), lr=0.05, momentum=0.5, **options) as optimizer:
            train_step(model, optimizer, *make_data())
            model.cuda()
            with pytest.raises(ModelChangedError, match=r"0\.weight.*cuda"):
                train_step(model, optimizer, *(tensor.cuda() for tensor in make_data()))
            model.cpu()
            optimizer.zero_grad()
            train_step(model, optimizer, *make_data())
            optimizer.pull()
        state = psclient.download(server.server)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.detach(), state[name]), name


@pytest.fixture
def no_waiting():
    """Return a context in which an operation that waits for the device is an error."""
    pytest.importorskip("triton")

    @contextmanager
    def context():
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return context


@pytest.mark.parametrize("momentum", [False, True], ids=["plain", "momentum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_device_selection_has_the_bits_of_the_reference(dtype, momentum, no_waiting):
    n, k, cuda = 5_000_003, 50_000, torch.device("cuda")
    select, state = DeviceSelection(cuda), {}
    memory, u = torch.zeros(n, device=cuda), torch.zeros(n, device=cuda) if momentum else None
    twin, twin_u = memory.clone(), None if u is None else u.clone()
    parameters = torch.randn(n, device=cuda).to(dtype)
    for step in range(10):
        gradient = torch.randn(n, device=cuda).to(dtype)
        with no_waiting():
            pending = select.take(memory, GradientUpdate(gradient, 0.1, parameters, 1e-4, u, 0.9), k, 0.5, state, u)
        taken = pending.collect()
        turn = state["turn"] * (5**0.5 - 1) / 2 % 1.0
        feed = GradientUpdate(gradient, 0.1, parameters, 1e-4, twin_u, 0.9)
        reference.accumulate(twin, feed)
        expected, hits = sift(twin, pending.threshold, int(1.25 * k), turn)
        twin[expected.offsets] = expected.values * 0.5
        if twin_u is not None:
            twin_u[expected.offsets] = 0
        assert torch.equal(taken.offsets, expected.offsets.cpu()), step
        assert torch.equal(taken.values, expected.values.cpu()), step
        assert torch.equal(memory, twin), step
        assert u is None or torch.equal(u, twin_u), step
        assert hits == pending.hits
        assert abs(pending.count - k) <= 0.1 * k, step


def test_device_selection_follows_its_inputs_and_waits_for_nothing_later(no_waiting):
    n, k, cuda, second = 1 << 20, 10_000, torch.device("cuda"), 1_500_000_000
    select, state = DeviceSelection(cuda), {}
    memory = torch.zeros(n, device=cuda)
    for _ in range(2):  # compiles; fills the allocators
        select.take(memory, GradientUpdate(torch.randn(n, device=cuda), 1.0), k, 0.0, state).collect()
    twin, kept = memory.clone(), torch.randn(n, device=cuda)
    torch.cuda.synchronize()
    later = torch.cuda.Event()
    with no_waiting():
        torch.cuda._sleep(second // 10)
        gradient = kept * 2  # is there only after the sleep
        pending = select.take(memory, GradientUpdate(gradient, 1.0), k, 0.0, state)
        del gradient
        overwritten = torch.full((n,), 7.0, device=cuda)  # may get the gradient's memory, but not too soon
        torch.cuda._sleep(second)
        later.record()
    taken = pending.collect()
    assert not later.query(), "collecting waited for work that was launched after the selection"
    turn = state["turn"] * (5**0.5 - 1) / 2 % 1.0
    reference.accumulate(twin, GradientUpdate(kept, 2.0))
    expected, _ = sift(twin, pending.threshold, int(1.25 * k), turn)
    twin[expected.offsets] = 0
    assert torch.equal(taken.offsets, expected.offsets.cpu())
    assert torch.equal(taken.values, expected.values.cpu())
    assert torch.equal(memory, twin)
    assert bool((overwritten == 7).all())

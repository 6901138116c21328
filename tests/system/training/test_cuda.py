"""The same promises with the model, the server or both on a GPU."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

import psclient
from psclient.errors import ModelChangedError
from psclient.rpc.local_server import LocalServer
from tests.pscore.kernel_makers import Twins, randn, same_bits
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
            return psclient.WAGMA(torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.5), **shared)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_device_selection_has_the_bits_of_the_host(dtype, no_waiting):
    sizes, states = [5_000_003, 1 << 20, 40_000], {row: {} for row in range(3)}
    twins = Twins(sizes, block=4096, memory=torch.zeros(sum(sizes)))
    k = np.array([50_000, 10_000, 400])
    twins.want(k)
    twins.rows["scale"], twins.rows["decay"], twins.rows["factor"], twins.rows["keep"] = 0.1, 1e-4, 0.9, 0.5
    for step in range(10):
        twins.used.clear()
        twins.give("gradient", [randn(n, step).to(dtype) for n in sizes])
        twins.give("parameters", [randn(n, step + 100).to(dtype) for n in sizes])
        twins.align()
        torch.cuda.synchronize()
        with no_waiting():
            twins.segments.launch(1.0, states)
        thresholds = []
        predict = twins.segments._predict

        def noted(found, numbers, predict=predict, thresholds=thresholds):
            thresholds.append((numbers, found))
            predict(found, numbers)

        twins.segments._predict = noted
        selected = twins.segments.collect(twins.parts(twins.memory), {})
        twins.segments._predict = predict
        for numbers, found in thresholds:
            accepted = found.taken >= 0
            twins.rows["threshold"][numbers[accepted]] = found.thresholds[accepted]
        offsets, values, counts = twins.on_host()
        assert np.array_equal(selected.offsets, offsets), step
        assert np.array_equal(selected.values, values), step
        assert np.array_equal(selected.counts, counts), step
        assert same_bits(twins.memory, torch.from_numpy(twins.host["memory"])), step
        assert same_bits(twins.momentum, torch.from_numpy(twins.host["momentum"])), step
        assert (np.abs(selected.counts - k) <= np.maximum(0.1 * k, 2 * np.sqrt(k))).all(), step


def test_device_selection_follows_its_inputs_and_waits_for_nothing_later(no_waiting):
    n, k, second = 1 << 20, 10_000, 1_500_000_000
    twins, states = Twins([n], block=4096, memory=torch.zeros(n)), {0: {}}
    twins.want([k])
    for step in range(2):  # compiles; fills the allocators
        twins.give("gradient", [randn(n, step)])
        twins.select(states)
    before, kept = twins.memory.clone(), torch.randn(n, device="cuda")
    torch.cuda.synchronize()
    later = torch.cuda.Event()
    twins.rows["searched"] = False
    twins.rows["threshold"], twins.rows["least"], twins.rows["most"] = 1.0, 0, n
    gradient = torch.empty(n, device="cuda")
    twins.rows["gradient"] = gradient.data_ptr()
    with no_waiting():
        torch.cuda._sleep(second // 10)
        torch.mul(kept, 2, out=gradient)  # is there only after the sleep
        twins.segments.launch(1.0, {})
        torch.cuda._sleep(second)
        later.record()
    selected = twins.segments.collect([twins.memory], {})
    assert not later.query(), "collecting waited for work that was launched after the selection"
    expected = before + 2 * kept
    offsets = (expected.abs() > 1.0).nonzero().view(-1)
    assert selected.offsets.tolist() == offsets.tolist()
    assert torch.equal(torch.from_numpy(selected.values), expected[offsets].cpu())
    assert torch.equal(twins.memory, expected.index_fill(0, offsets, 0.0))

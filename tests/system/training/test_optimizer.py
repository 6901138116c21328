"""The optimizers are real optimizers: everything a training script does with one works."""

import copy
import io
import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import psclient
from psclient.compress.host_table import Choice
from psclient.engine import engine, lifecycle
from psclient.errors import (
    ConfigurationError,
    FingerprintMismatchError,
    NonFiniteGradientError,
    RunFinishedError,
    SettingsMismatchError,
    WorkerAliveError,
)
from psclient.rpc.local_server import LocalServer
from psclient.rpc.shard_stream import ShardStream
from pscore.selection.cuda.launches import DeviceKernels
from tests.system.tools import QUICK, assert_same_parameters, make_data, make_model, train_step
from tests.tiers import long_but


def dgs(model, server, **options):
    options = {"lr": 0.1, "momentum": 0.5, "density": 0.1, "model": model, "settings": QUICK} | options
    params = options.pop("params", None) or model.parameters()
    return psclient.DGS(params, server=server, **options)


def test_param_groups_have_their_own_rate_and_decay(server):
    model = make_model(batch_norm=False)
    groups = [
        {"params": model[0].parameters(), "lr": 0.0},
        {"params": model[2].parameters(), "weight_decay": 0.1},
    ]
    before = copy.deepcopy(model)
    optimizer = dgs(model, server, params=groups)
    train_step(model, optimizer, *make_data())
    assert torch.equal(model[0].weight, before[0].weight)
    assert not torch.equal(model[2].weight, before[2].weight)


def test_schedulers_work_on_every_worker(server):
    models = [make_model(i) for i in range(2)]
    optimizers = [dgs(m, server, worker=f"w{i}", lr=0.4) for i, m in enumerate(models)]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, step_size=2, gamma=0.5) for o in optimizers]
    for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
        for _ in range(4):
            train_step(model, optimizer, *make_data())
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_a_schedule_may_follow_the_servers_version(server):
    models = [make_model(i) for i in range(2)]
    a, b = (dgs(m, server, worker=f"w{i}", lr=1.0) for i, m in enumerate(models))
    clock = psclient.VersionClock(torch.optim.lr_scheduler.StepLR(a, 1, 0.5), a, versions_per_step=4)
    for _ in range(6):
        train_step(models[1], b, *make_data())
    train_step(models[0], a, *make_data())
    clock.step()
    assert a.version == 7
    assert a.param_groups[0]["lr"] == pytest.approx(0.5)


def test_frozen_unused_and_tied_parameters_are_fine(server):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(16, 8)
            self.head = nn.Linear(8, 16, bias=False)
            self.head.weight = self.embed.weight
            self.frozen = nn.Linear(8, 8)
            self.frozen.requires_grad_(False)
            self.unused = nn.Parameter(torch.ones(3))
            self.scalar = nn.Parameter(torch.tensor(1.0))
            self.empty = nn.Parameter(torch.empty(0))

        def forward(self, x):
            return self.head(self.frozen(self.embed(x))) * self.scalar

    model = Tied()
    frozen = model.frozen.weight.clone()
    optimizer = dgs(model, server)
    x = torch.arange(16)
    for _ in range(5):
        train_step(model, optimizer, x, x)
    assert torch.equal(model.frozen.weight, frozen)
    assert torch.equal(model.unused, torch.ones(3))
    assert model.scalar.item() != 1.0
    fresh = Tied()
    missing = fresh.load_state_dict(psclient.download(server.server), strict=False).missing_keys
    assert missing == ["frozen.weight", "frozen.bias"]
    assert torch.equal(fresh.head.weight, model.embed.weight)


def test_channels_last_and_sparse_gradients(server):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4)).to(memory_format=torch.channels_last)
    optimizer = dgs(model, server)
    x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    for _ in range(3):
        train_step(model, optimizer, x, torch.arange(4))
        assert_same_parameters(model, server.server)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_an_embedding_with_sparse_gradients_trains(server):
    model = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Flatten(), nn.Linear(12, 3))
    optimizer = dgs(model, server)
    train_step(model, optimizer, torch.randint(0, 50, (8, 3)), torch.randint(0, 3, (8,)))
    assert_same_parameters(model, server.server)


def test_closure_and_gradient_accumulation(server):
    model = make_model(batch_norm=False)
    optimizer = dgs(model, server)
    x, y = make_data()

    def closure():
        optimizer.zero_grad()
        for part in range(4):  # four backward passes, one push
            rows = slice(64 * part, 64 * part + 64)
            (nn.functional.cross_entropy(model(x[rows]), y[rows]) / 4).backward()
        return torch.tensor(7.0)

    assert optimizer.step(closure) == 7.0
    assert optimizer.version == 1
    assert optimizer.totals.samples == 256


def test_grad_scaler_skips_what_overflows(server):
    model = make_model(batch_norm=False)
    optimizer = dgs(model, server)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x, y = make_data()
    for step in range(4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.version == 3


def test_grad_scaler_unscales_before_the_selection():
    w = torch.nn.Parameter(torch.zeros(8))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with psclient.DGS([w], lr=1.0, density=0.25, momentum=0.0, server="local", settings=QUICK) as optimizer:
        scaler.scale((w * torch.arange(8.0)).sum()).backward()
        scaler.step(optimizer)
        assert w.tolist() == [0, 0, 0, 0, 0, 0, -6, -7]
        assert optimizer.state_dict()["state"][0]["residual"].tolist() == [0, 1, 2, 3, 4, 5, 0, 0]


def select_by_launches(monkeypatch):
    """The host is a device, in Triton's interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setattr(engine, "Choice", partial(Choice, on_device=DeviceKernels))


def test_on_a_device_nothing_is_lost_or_pushed_twice_where_a_push_does_not_open(server, monkeypatch):
    select_by_launches(monkeypatch)
    w = nn.Parameter(torch.zeros(8))
    optimizer = psclient.DGS([w], lr=1.0, density=1.0, momentum=0.0, server=server, settings=QUICK)
    w.grad = torch.arange(8.0)

    def refuse(*_):
        raise OSError("no stream")

    with monkeypatch.context() as patch:
        patch.setattr(ShardStream, "open_push", refuse)
        with pytest.raises(OSError, match="no stream"):
            optimizer.step()
    assert torch.equal(optimizer.state_dict()["state"][0]["residual"], w.grad)
    optimizer.step()
    optimizer.flush()
    optimizer.pull()
    assert torch.equal(w.detach(), -w.grad)


@pytest.mark.parametrize(
    "method", long_but([psclient.DGS], [psclient.DGS, psclient.ASGD, psclient.DGC]), ids=lambda method: method.__name__
)
@pytest.mark.parametrize("on_device", [False, True])
def test_a_non_finite_gradient_names_its_parameter_and_changes_nothing(server, method, on_device, monkeypatch):
    if on_device:
        select_by_launches(monkeypatch)
    model = make_model(batch_norm=False)
    options = {"momentum": 0.5, "settings": QUICK.model_copy(update={"bucket_bytes": 400})}
    options |= {"clip_norm": 1.0} if method is psclient.DGC else {}
    optimizer = method(model.parameters(), lr=0.1, model=model, server=server, **options)
    train_step(model, optimizer, *make_data())
    before, samples = copy.deepcopy(optimizer.state_dict()["state"]), optimizer.totals.samples
    model[2].bias.grad[1] = float("nan")
    with pytest.raises(NonFiniteGradientError, match=r"2\.bias") as caught:
        optimizer.step()
    assert caught.value.parameter == "2.bias"
    after = optimizer.state_dict()["state"]
    for key, state in before.items():
        tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        assert all(torch.equal(value, after[key][name]) for name, value in tensors.items())
    assert optimizer.version == 1
    assert optimizer.totals.samples == samples
    train_step(model, optimizer, *make_data())
    assert optimizer.version == 2


def test_state_dict_carries_the_residuals(server):
    model = make_model(batch_norm=False)
    optimizer = dgs(model, server, worker="w")
    train_step(model, optimizer, *make_data())
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    optimizer.close()
    file.seek(0)
    resumed_model = make_model(5, batch_norm=False)
    resumed = dgs(resumed_model, server, worker="w")
    saved = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved)
    for saved_state, state in zip(saved["state"].values(), resumed.state_dict()["state"].values(), strict=True):
        assert torch.equal(saved_state["residual"], state["residual"])
        assert state["residual"].abs().sum() > 0
    assert_same_parameters(resumed_model, server.server)


def test_residuals_that_were_loaded_are_trained_with(server):
    """What was held when the state was saved reaches the server through the optimizer that has loaded it."""
    gradient = torch.randn(100)
    for life in range(2):
        w = nn.Parameter(torch.zeros(100))
        optimizer = psclient.GradientDropping([w], lr=1.0, density=0.1, server=server, worker="w", settings=QUICK)
        if life == 0:
            w.grad = gradient.clone()
            optimizer.step()
            saved = copy.deepcopy(optimizer.state_dict())
        else:
            optimizer.load_state_dict(saved)
            optimizer.flush()
        optimizer.close()
    torch.testing.assert_close(psclient.download(server.server)["parameter_0"], -gradient)


def test_a_state_dict_older_than_the_last_push_drops_its_residuals(server, caplog):
    model = make_model(batch_norm=False)
    optimizer = dgs(model, server, worker="w")
    train_step(model, optimizer, *make_data())
    old = copy.deepcopy(optimizer.state_dict())
    train_step(model, optimizer, *make_data())
    optimizer.close()
    resumed = dgs(make_model(5, batch_norm=False), server, worker="w")
    resumed.load_state_dict(old)
    assert "residuals" in caplog.text
    assert not any(bool(each["residual"].any()) for each in resumed.state_dict()["state"].values())


def test_states_are_loaded_as_often_as_one_likes(server, caplog):
    for _ in range(2):  # the second life finds the first one's last push at the server
        model = make_model(batch_norm=False)
        with dgs(model, server, worker="w") as optimizer:
            for _ in range(2):
                optimizer.load_state_dict(optimizer.state_dict())
                train_step(model, optimizer, *make_data())
    assert "residuals" not in caplog.text


def test_half_precision_residuals_survive_a_state_dict_in_fp32(server):
    model = make_model(batch_norm=False).bfloat16()
    optimizer = dgs(model, server)
    x, y = make_data()
    train_step(model, optimizer, x.bfloat16(), y)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(state["residual"].dtype == torch.float32 for state in optimizer.state.values())


def test_groups_added_later_must_be_the_models(server):
    model = make_model(batch_norm=False)
    optimizer = dgs(model, server, params=list(model[0].parameters()))
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.01})
    with pytest.raises(ConfigurationError, match="not part of the model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    train_step(model, optimizer, *make_data())
    assert_same_parameters(model, server.server)


def test_bare_parameters_train_without_a_model(server):
    w = nn.Parameter(torch.ones(10))
    optimizer = psclient.GradientDropping([w], lr=0.1, server=server, settings=QUICK)
    for _ in range(20):
        optimizer.zero_grad()
        w.square().sum().backward()
        optimizer.step()
    assert w.abs().max() < 0.9


def test_data_loader_processes_do_not_disturb(server):
    model = make_model(batch_norm=False)
    optimizer = dgs(model, server)
    loader = DataLoader(TensorDataset(*make_data()), batch_size=64, num_workers=2)
    for _ in range(2):
        for x, y in loader:
            train_step(model, optimizer, x, y)
    assert optimizer.version == 8


def test_an_optimizer_outside_the_main_thread(server):
    failures = []

    def work():
        try:
            model = make_model(batch_norm=False)
            with dgs(model, server) as optimizer:
                train_step(model, optimizer, *make_data())
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert not failures


def test_another_model_is_refused_and_the_tensor_named(server):
    optimizer = dgs(make_model(), server, worker="a")
    other = make_model()
    other[3] = nn.Linear(32, 5)
    with pytest.raises(FingerprintMismatchError, match=r"3\.weight") as caught:
        dgs(other, server, worker="b")
    assert caught.value.tensor == "3.weight"
    optimizer.close()


def test_another_method_or_momentum_is_refused(server):
    optimizer = dgs(make_model(), server, worker="a")
    with pytest.raises(SettingsMismatchError, match="asgd"):
        psclient.ASGD((m := make_model()).parameters(), lr=0.1, model=m, server=server, worker="b", settings=QUICK)
    with pytest.raises(SettingsMismatchError, match="momentum"):
        dgs(make_model(), server, worker="c", momentum=0.9)
    optimizer.close()


def test_a_living_workers_name_is_refused(monkeypatch):
    with LocalServer(lease_seconds=1) as server:
        optimizer = dgs(make_model(), server, worker="same")
        monkeypatch.setattr(lifecycle, "_claims", [])  # as in another process, which does not know the first
        with pytest.raises(WorkerAliveError, match="same"):
            dgs(make_model(), server, worker="same")
        optimizer.close()


def test_a_run_ends_at_its_version():
    with LocalServer(end_versions=3) as server:
        model = make_model()
        optimizer = dgs(model, server)
        steps = 0
        while not optimizer.finished:
            train_step(model, optimizer, *make_data())
            steps += 1
        assert steps == 3
        with pytest.raises(RunFinishedError):
            optimizer.step()


def test_a_run_ends_after_its_samples_on_every_shard(tmp_path):
    final = tmp_path / "model.safetensors"
    with LocalServer(shards=2, end_samples=1000, final_model=final) as server:
        model = make_model()
        with dgs(model, server) as optimizer:
            while not optimizer.finished:
                train_step(model, optimizer, *make_data())
            assert optimizer.version == 4
    parts = sorted(tmp_path.iterdir())
    assert [part.name for part in parts] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lr": -1.0}, "lr"),
        ({"momentum": 1.0}, "momentum"),
        ({"density": 0.0}, "density"),
        ({"density": 1.5}, "density"),
    ],
)
def test_bad_hyperparameters_are_named(options, named):
    with pytest.raises(ConfigurationError, match=named):
        dgs(make_model(), "127.0.0.1:1", **options)


def test_double_precision_is_refused_with_advice():
    with pytest.raises(ConfigurationError, match=r"model\.float"):
        dgs(make_model().double(), "127.0.0.1:1")


def test_momentum_that_is_high_for_the_fleet_is_said(caplog):
    with LocalServer() as server:
        models = [make_model(i) for i in range(4)]
        optimizers = [dgs(m, server, worker=f"w{i}", momentum=0.9) for i, m in enumerate(models)]
        train_step(models[3], optimizers[3], *make_data())
        assert "momentum 0.9 with 4 workers" in caplog.text


def test_a_density_schedule_is_followed(server):
    model = make_model(batch_norm=False)
    optimizer = dgs(model, server, density=lambda step: 0.5 if step == 1 else 0.05)
    entries = []
    for _ in range(3):
        train_step(model, optimizer, *make_data())
        entries.append(optimizer.report.push_entries)
    total = sum(p.numel() for p in model.parameters())
    assert 0.45 * total < entries[0] <= 0.55 * total
    assert entries[1] <= 0.055 * total + 4


@pytest.mark.parametrize("samples", [-1, 1.5, 2**70])
def test_a_bad_number_of_samples_is_refused_and_the_next_step_works(server, samples):
    model = make_model(batch_norm=False)
    optimizer = dgs(model, server)
    train_step(model, optimizer, *make_data())
    with pytest.raises(ConfigurationError, match="samples"):
        optimizer.step(samples=samples)
    train_step(model, optimizer, *make_data())
    assert optimizer.version == 2


def test_a_state_of_another_optimizer_is_refused(server):
    model = make_model(batch_norm=False)
    optimizer = dgs(model, server)
    with pytest.raises(ConfigurationError, match=r"momentum 0\.5"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5).state_dict())
    train_step(model, optimizer, *make_data())


@pytest.mark.parametrize("density", [0, 2, float("nan"), "x"])
def test_a_density_schedule_out_of_range_is_said(server, density):
    model = make_model(batch_norm=False)
    optimizer = dgs(model, server, density=lambda step: 0.1 if step < 2 else density)
    train_step(model, optimizer, *make_data())
    with pytest.raises(ConfigurationError, match="density"):
        train_step(model, optimizer, *make_data())


def test_after_close_a_step_says_so(server):
    model = make_model(batch_norm=False)
    optimizer = dgs(model, server)
    optimizer.close()
    with pytest.raises(ConfigurationError, match="close"):
        optimizer.step()

"""The server's own optimizer, through a real server: what torch does at home, restarts, and words only."""

import pytest
import torch
from torch import nn

import psclient
from psclient.errors import ConfigurationError, RefusedError, SettingsMismatchError
from tests.system.tools import QUICK, assert_close, at_once, make_data, make_model, same, train_step


def model(seed=0):
    return make_model(seed, batch_norm=False)


def optimizer_for(mine, name, options=None, **more):
    return psclient.ServerOptimizer(mine.parameters(), name, options, model=mine, **({"settings": QUICK} | more))


def test_per_round_it_is_the_optimizer_on_the_mean_gradient():
    here = model()
    local = torch.optim.Adam(here.parameters(), lr=0.01)
    for step in range(8):
        x, y = make_data(seed=step, count=64)
        train_step(here, local, x, y)
    with psclient.LocalServer() as server:

        def work(worker):
            rounds, mine = psclient.Rounds(start_workers=2), models[worker]
            given = {"server": server, "worker": f"worker-{worker}", "rounds": rounds}
            with optimizer_for(mine, "Adam", {"lr": 0.01}, **given) as optimizer:
                for step in range(8):
                    x, y = make_data(seed=step, count=64)
                    train_step(mine, optimizer, x[worker::2], y[worker::2])

        models = [model() for _ in range(2)]  # here: threads would draw from one generator at the same time
        at_once(work, range(2))
    assert same(*models)
    assert_close(models[0], here, 1e-3, 1e-5)


@pytest.mark.parametrize("lazy", [False, True])
def test_sparse_gradients_train_and_the_way_down_is_sparse_too(lazy):
    mine = model()
    x, y = make_data(seed=5)
    before = nn.functional.cross_entropy(mine(x), y).item()
    settings = {"density": 0.05, "lazy": lazy}
    with (
        psclient.LocalServer(down_density=0.2, down_dense_below=0) as server,
        optimizer_for(mine, "Adam", {"lr": 0.02}, server=server, **settings) as optimizer,
    ):
        for step in range(60):
            train_step(mine, optimizer, *make_data(seed=step, count=64))
        if lazy:
            assert optimizer.report.reply_mode == "exact"
            assert optimizer.report.pull_entries == optimizer.report.push_entries
        else:
            assert optimizer.report.reply_mode == "topk"
            assert optimizer.report.pull_entries < 0.3 * sum(p.numel() for p in mine.parameters())
    assert nn.functional.cross_entropy(mine(x), y).item() < 0.8 * before


@pytest.mark.parametrize(
    ("name", "options", "more"),
    [
        ("Nonsense", {}, {}),
        ("SGD", {"speed": 3}, {}),
        ("Muon", {}, {}),
        ("SGD", {}, {"scheduler": "ReduceLROnPlateau"}),
        ("SGD", {}, {"scheduler": ("StepLR", {})}),
        ("Rprop", {}, {"lazy": True}),
    ],
)
def test_what_the_server_cannot_run_is_said_at_once(name, options, more):
    mine = model()
    with psclient.LocalServer() as server, pytest.raises(RefusedError) as refused:
        optimizer_for(mine, name, options, server=server, **more)
    assert refused.value.reason == "BAD_REQUEST"


def test_code_cannot_be_sent():
    mine = model()
    with pytest.raises(ConfigurationError, match="numbers"):
        optimizer_for(mine, "SGD", {"lr": 0.1}, scheduler=("LambdaLR", {"lr_lambda": lambda step: 1.0}))


def test_workers_must_agree_on_the_optimizer():
    one, two = model(), model()
    with (
        psclient.LocalServer() as server,
        optimizer_for(one, "SGD", {"lr": 0.1}, server=server, worker="one"),
        pytest.raises(SettingsMismatchError, match="optimizer"),
    ):
        optimizer_for(two, "SGD", {"lr": 0.2}, server=server, worker="two")


def groups_of(one):
    return [{"params": [one[0].weight, one[0].bias], "lr": 0.05}, {"params": one[2].parameters()}]


def test_a_rate_set_by_hand_is_the_servers():
    here, there = model(), model()
    local = torch.optim.AdamW(groups_of(here), lr=0.01)
    with (
        psclient.LocalServer(shards=2) as server,
        psclient.ServerOptimizer(
            groups_of(there), "AdamW", {"lr": 0.01}, model=there, server=server, settings=QUICK
        ) as optimizer,
    ):
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01]
        for step, rates in enumerate([(0.05, 0.01), (0.3, 0.0), (0.0, 0.0), (0.07, 0.02), (0.05, 0.01)]):
            before = [parameter.detach().clone() for parameter in there.parameters()]
            for either in (local, optimizer):
                for group, rate in zip(either.param_groups, rates, strict=True):
                    group["lr"] = rate
            batch = make_data(seed=step, count=32)
            train_step(here, local, *batch)
            train_step(there, optimizer, *batch)
            assert same(here, there)
            still = [torch.equal(now, was) for now, was in zip(there.parameters(), before, strict=True)]
            assert still == [rates[0] == 0] * 2 + [rates[1] == 0] * 2


def test_without_a_rate_the_groups_have_torchs_own():
    mine = model()
    with optimizer_for(mine, "RMSprop") as optimizer:
        assert [group["lr"] for group in optimizer.param_groups] == [0.01]
        assert optimizer.defaults["lr"] == 0.01


def test_a_rate_by_hand_is_a_factor_of_the_servers_own_schedule():
    here, there = model(), model()
    local = torch.optim.SGD(here.parameters(), lr=0.5)
    scheduler = ("StepLR", {"step_size": 1, "gamma": 0.5})
    with optimizer_for(there, "SGD", {"lr": 0.5}, scheduler=scheduler) as optimizer:
        optimizer.param_groups[0]["lr"] = 0.25
        for step in range(4):
            local.param_groups[0]["lr"] = 0.25 * 0.5**step
            batch = make_data(seed=step, count=32)
            train_step(here, local, *batch)
            train_step(there, optimizer, *batch)
            assert same(here, there)


def test_what_else_is_set_by_hand_is_refused():
    mine = model()
    with optimizer_for(mine, "AdamW", {"lr": 0.1, "weight_decay": 0.1}) as optimizer:
        optimizer.param_groups[0]["weight_decay"] = 0.5
        with pytest.raises(ConfigurationError, match="weight_decay"):
            train_step(mine, optimizer, *make_data(count=8))
        del optimizer.param_groups[0]["weight_decay"]
        train_step(mine, optimizer, *make_data(count=8))
        assert optimizer.version == 1


def test_a_round_steps_at_the_mean_of_its_workers_rates():
    with psclient.LocalServer() as server:
        start, rates = model(), {"one": 0.1, "two": 0.5}
        models = {name: model() for name in rates}
        x, y = make_data(count=32)
        torch.nn.functional.cross_entropy(start(x), y).backward()

        def work(name):
            rounds, mine = psclient.Rounds(start_workers=2), models[name]
            with optimizer_for(mine, "SGD", {"lr": 1.0}, server=server, worker=name, rounds=rounds) as optimizer:
                optimizer.param_groups[0]["lr"] = rates[name]
                train_step(mine, optimizer, x, y)

        at_once(work, rates)
    assert same(*models.values())
    for found, was in zip(models["one"].parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(found, was - 0.3 * was.grad)


def test_options_of_other_libraries_stay_on_the_worker(caplog):
    """timm's layer decay, names, and what a scheduler has left there."""
    here, there = model(), model()

    def groups(one):
        return [
            {"params": list(one[0].parameters()), "lr_scale": 0.5, "name": "body", "initial_lr": 0.1},
            {"params": list(one[2].parameters()), "weight_decay": 0.1, "flavour": "sweet"},
        ]

    local = torch.optim.SGD(groups(here), lr=0.1)
    with psclient.ServerOptimizer(groups(there), "SGD", {"lr": 0.1}, model=there, server="local") as optimizer:
        assert optimizer.param_groups[0]["lr_scale"] == 0.5
        for step in range(3):
            batch = make_data(seed=step, count=32)
            train_step(here, local, *batch)
            train_step(there, optimizer, *batch)
        assert same(here, there)
    assert caplog.text.count("flavour") == 1
    assert "lr_scale" not in caplog.text


def test_a_schedule_that_counts_samples_needs_no_number_of_workers(tmp_path):
    here, there = model(), model()
    local = torch.optim.SGD(here.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(local, 1, 0.5)
    options = {"scheduler": ("StepLR", {"step_size": 1, "gamma": 0.5}), "scheduler_every": ("samples", 50)}
    trained = 0
    with (
        psclient.LocalServer(data_dir=tmp_path) as server,
        optimizer_for(there, "SGD", {"lr": 0.1}, server=server, **options) as optimizer,
    ):
        for step, count in enumerate([30, 30, 120, 10, 40]):
            batch = make_data(seed=step, count=count)
            train_step(here, local, *batch)
            train_step(there, optimizer, *batch)
            for _ in range((trained + count) // 50 - trained // 50):
                schedule.step()
            trained += count
            if step == 2:
                server.processes[0].kill()
                server.restart()
        assert same(here, there)


@pytest.mark.parametrize("every", [True, 0, 0.5, ("epochs", 1), ("samples", 0), ("samples",), ("samples", 1.5)])
def test_a_schedule_counts_versions_or_samples(every):
    with pytest.raises(ConfigurationError, match="scheduler_every"):
        optimizer_for(model(), "SGD", {"lr": 0.1}, scheduler="StepLR", scheduler_every=every)


def test_parameters_may_be_named_and_none_can_be_added_that_the_server_would_leave_alone():
    mine = model()
    with psclient.ServerOptimizer(
        mine[0].named_parameters(), "SGD", {"lr": 0.1}, model=mine, server="local"
    ) as optimizer:
        with pytest.raises(ConfigurationError, match="another one"):
            optimizer.add_param_group({"params": list(mine[2].named_parameters())})
        assert len(optimizer.param_groups) == 1
        before = mine[0].weight.detach().clone()
        train_step(mine, optimizer, *make_data(count=8))
        assert not torch.equal(mine[0].weight, before)

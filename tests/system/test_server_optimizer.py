"""The server's own optimizer, through a real server: what torch does at home, restarts, and words only."""

import threading

import pytest
import torch
from torch import nn

import psclient
from psclient.errors import ConfigurationError, RefusedError, SettingsMismatchError
from tests.system.tools import QUICK, assert_same_parameters, make_data, make_model, train_step


def model(seed=0):
    return make_model(seed, batch_norm=False)


def optimizer_for(mine, name, options=None, **more):
    return psclient.ServerOptimizer(mine.parameters(), name, options, model=mine, **({"settings": QUICK} | more))


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_one_worker_gets_what_the_same_optimizer_does_at_home():
    here, there = model(), model()
    with (
        psclient.LocalServer(shards=2) as server,
        optimizer_for(
            there,
            "RMSprop",
            {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01},
            scheduler=("StepLR", {"step_size": 3, "gamma": 0.5}),
            scheduler_every=2,
            server=server,
        ) as optimizer,
    ):
        local = torch.optim.RMSprop(here.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(local, 3, 0.5)
        for step in range(15):
            batch = make_data(seed=step, count=32)
            train_step(here, local, *batch)
            train_step(there, optimizer, *batch)
            if step % 2:
                schedule.step()
            assert same(here, there)


def test_a_groups_options_reach_the_server_and_frozen_parameters_stay():
    here, there = model(), model()
    for one in (here, there):
        one[0].bias.requires_grad_(False)
    groups = [
        [{"params": [one[0].weight], "lr": 0.5, "weight_decay": 0.0}, {"params": [one[2].weight, one[2].bias]}]
        for one in (here, there)
    ]
    local = torch.optim.AdamW(groups[0], lr=0.01, weight_decay=0.1)
    with psclient.ServerOptimizer(groups[1], "AdamW", {"lr": 0.01, "weight_decay": 0.1}, model=there) as optimizer:
        for step in range(5):
            batch = make_data(seed=step, count=32)
            train_step(here, local, *batch)
            train_step(there, optimizer, *batch)
    assert same(here, there)


def test_its_state_outlives_the_server(tmp_path):
    here, there = model(), model()
    local = torch.optim.Adam(here.parameters(), lr=0.01)
    with psclient.LocalServer(data_dir=tmp_path, snapshot_seconds=0.2) as server:
        with optimizer_for(there, "Adam", {"lr": 0.01}, server=server) as optimizer:
            for step in range(12):
                batch = make_data(seed=step, count=32)
                train_step(here, local, *batch)
                train_step(there, optimizer, *batch)
                assert same(here, there)
                if step in (3, 7):
                    server.processes[0].kill()
                    server.restart()
        assert_same_parameters(here, server.server)


def test_per_round_it_is_the_optimizer_on_the_mean_gradient():
    here = model()
    local = torch.optim.Adam(here.parameters(), lr=0.01)
    for step in range(8):
        x, y = make_data(seed=step, count=64)
        train_step(here, local, x, y)
    with psclient.LocalServer() as server:
        found = {}
        models = [model() for _ in range(2)]  # here: threads would draw from one generator at the same time

        def work(worker):
            mine = models[worker]
            rounds = psclient.Rounds(start_workers=2)
            with optimizer_for(
                mine, "Adam", {"lr": 0.01}, server=server, worker=f"worker-{worker}", rounds=rounds
            ) as optimizer:
                for step in range(8):
                    x, y = make_data(seed=step, count=64)
                    train_step(mine, optimizer, x[worker::2], y[worker::2])
            found[worker] = mine

        threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert same(found[0], found[1])
    for mine, expected in zip(found[0].parameters(), here.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-5)


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
        ("SGD", {}, {"scheduler_every": 0}),
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


def test_a_scheduler_on_the_worker_finds_no_rate_to_drive():
    mine = model()
    with optimizer_for(mine, "SGD", {"lr": 0.1}) as optimizer, pytest.raises(ConfigurationError, match="scheduler="):
        torch.optim.lr_scheduler.StepLR(optimizer, 1)


def test_parameters_may_be_named_and_none_can_be_added_that_the_server_would_leave_alone():
    mine = model()
    with psclient.ServerOptimizer(mine[0].named_parameters(), "SGD", {"lr": 0.1}, model=mine) as optimizer:
        with pytest.raises(ConfigurationError, match="another one"):
            optimizer.add_param_group({"params": list(mine[2].named_parameters())})
        assert len(optimizer.param_groups) == 1
        before = mine[0].weight.detach().clone()
        train_step(mine, optimizer, *make_data(count=8))
        assert not torch.equal(mine[0].weight, before)

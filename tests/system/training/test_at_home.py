"""One worker, through a real server, gets what an optimizer of torch does at home; through restarts as well."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

import psclient
from tests.system.tools import QUICK, assert_close, make_data, make_model, same, train_step
from tests.tiers import long_but


def case(home, ours, *, shards=1, steps=12, tolerance=None, schedules=(), period=1, kills=(), groups=None, **more):
    """``home`` makes torch's optimizer of parameters, ``ours`` the worker's; no ``tolerance``: the same bits.

    Schedules are for home and, if there are two, for ours; they step every ``period`` steps.
    """
    groups = groups or (lambda model: list(model.parameters()))
    return SimpleNamespace(**locals() | more)


def by_server(name, options, **more):
    return lambda params, **c: psclient.ServerOptimizer(params, name, options, **more, **c)


def outer(params, **common):
    inner = torch.optim.Adam(params, lr=0.01)
    return psclient.Outer(inner, sync_every=4, outer_optimizer=("SGD", {"lr": 1.0, "momentum": 0.0}), **common)


def half_frozen(model):
    model[0].bias.requires_grad_(False)
    groups = [{"params": [model[0].weight], "lr": 0.5, "weight_decay": 0.0}]
    return [*groups, {"params": [model[2].weight, model[2].bias]}]


def with_a_rate(model):
    return [{"params": list(model.parameters()), "lr": 0.05}]


step_lr, cosine = torch.optim.lr_scheduler.StepLR, torch.optim.lr_scheduler.CosineAnnealingLR
RMSPROP = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01}
MOMENTUM = {"lr": 0.1, "momentum": 0.9}
CASES = {
    "RMSprop and a schedule of the server": case(
        partial(torch.optim.RMSprop, **RMSPROP),
        by_server("RMSprop", RMSPROP, scheduler=("StepLR", {"step_size": 3, "gamma": 0.5}), scheduler_every=2),
        shards=2, steps=15, schedules=[partial(step_lr, step_size=3, gamma=0.5)], period=2,
    ),
    "options of groups, frozen parameters": case(
        partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
        by_server("AdamW", {"lr": 0.01, "weight_decay": 0.1}), steps=5, groups=half_frozen,
    ),
    "Adam through restarts": case(
        partial(torch.optim.Adam, lr=0.01), by_server("Adam", {"lr": 0.01}), kills=(3, 7)
    ),
    **{
        f"SGD and a schedule of torch's, {who}": case(
            partial(torch.optim.SGD, **MOMENTUM), by_server("SGD", MOMENTUM),
            steps=6, schedules=2 * [partial(cosine, T_max=5)], groups=groups,
        )
        for who, groups in (("rate of the optimizer", None), ("rate of the group", with_a_rate))
    },
    "RMSprop by entries through restarts": case(
        partial(torch.optim.RMSprop, lr=0.01, weight_decay=0.01),
        partial(psclient.ServerRMSprop, lr=0.01, weight_decay=0.01, density=1.0),
        shards=2, steps=14, tolerance=(1e-4, 1e-5), schedules=2 * [partial(step_lr, step_size=4, gamma=0.5)],
        kills=(3, 8),
    ),
    "local steps, taken over as they are": case(
        partial(torch.optim.Adam, lr=0.01), outer, tolerance=(1e-5, 1e-6), version=3
    ),
    "ASGD": case(
        partial(torch.optim.SGD, lr=0.1, weight_decay=1e-3), partial(psclient.ASGD, lr=0.1, weight_decay=1e-3),
        steps=20, tolerance=(1e-4, 1e-6),
    ),
    "DGS of density 1": case(
        partial(torch.optim.SGD, lr=0.05, momentum=0.7), partial(psclient.DGS, lr=0.05, momentum=0.7, density=1.0),
        steps=20, tolerance=(1e-4, 1e-6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", long_but(list(CASES.values())[::4], CASES.values()), ids=CASES)
def test_one_worker_gets_what_torch_does_at_home(case, tmp_path):
    here, there = make_model(3, batch_norm=False), make_model(3, batch_norm=False)
    local = case.home(case.groups(here))
    with psclient.LocalServer(case.shards, data_dir=tmp_path, snapshot_seconds=0.2) as server:
        with case.ours(case.groups(there), model=there, server=server, settings=QUICK) as optimizer:
            schedules = [make(each) for make, each in zip(case.schedules, (local, optimizer), strict=False)]
            for step in range(case.steps):
                batch = make_data(seed=step, count=32)
                train_step(here, local, *batch)
                train_step(there, optimizer, *batch)
                for schedule in schedules if step % case.period == case.period - 1 else ():
                    schedule.step()
                if case.tolerance is None:
                    assert same(here, there)
                else:
                    assert_close(here, there, *case.tolerance)
                if step in case.kills:
                    shard = case.kills.index(step) % case.shards
                    server.processes[shard].kill()
                    server.restart(shard)
            assert len({tuple(each.get_last_lr()) for each in schedules}) < 2
            assert optimizer.version == getattr(case, "version", case.steps)
        served = psclient.download(server.server)
        trained = {name: each.detach() for name, each in there.named_parameters() if each.requires_grad}
        assert all(torch.equal(served[name], value) for name, value in trained.items())

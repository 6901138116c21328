"""Loading a state that another method, optimizer or run has saved: taken over where that is exact, else refused."""

import pytest
import torch

import psclient
from psclient.errors import ConfigurationError
from tests.system.tools import QUICK, make_data, make_model, train_step

METHODS = {
    "dgs": lambda mine, **more: psclient.DGS(mine.parameters(), 0.1, model=mine, **more),
    "dropping": lambda mine, **more: psclient.GradientDropping(mine.parameters(), 0.1, model=mine, **more),
    "asgd": lambda mine, **more: psclient.ASGD(mine.parameters(), 0.1, momentum=0.9, model=mine, **more),
    "server": lambda mine, **more: psclient.ServerOptimizer(mine.parameters(), "SGD", {"lr": 0.1}, model=mine, **more),
    "outer": lambda mine, **more: psclient.Outer(
        torch.optim.SGD(mine.parameters(), 0.1), sync_every=1, model=mine, **more
    ),
    "alone": lambda mine, **more: psclient.MomentumSGD(mine.parameters(), 0.1),
}


def model():
    return make_model(batch_norm=False)


def state_of(name):
    mine = model()
    with METHODS[name](mine, settings=QUICK) as optimizer:
        train_step(mine, optimizer, *make_data(count=32))
        return optimizer.state_dict()


def torchs(kind, **options):
    mine = model()
    optimizer = kind(mine.parameters(), **options)
    for step in range(3):
        train_step(mine, optimizer, *make_data(seed=step, count=32))
    return mine, optimizer


@pytest.mark.parametrize(
    ("saved", "loaded"), [("dgs", "server"), ("dgs", "dropping"), ("dgs", "alone"), ("asgd", "outer")]
)
def test_a_state_of_another_method_is_refused(saved, loaded):
    state, mine = state_of(saved), model()
    optimizer = METHODS[loaded](mine)
    with pytest.raises(ConfigurationError, match="inner" if loaded == "outer" else f"'{saved}'.*weights alone"):
        optimizer.load_state_dict(state)
    assert not any(optimizer.state.values())
    if loaded != "alone":
        optimizer.close()


@pytest.mark.parametrize(
    "method",
    [
        lambda mine, **more: psclient.ASGD(mine.parameters(), 1.0, momentum=0.9, **more),
        lambda mine, **more: psclient.SSGD(mine.parameters(), 1.0, momentum=0.9, **more),
    ],
    ids=["asgd", "ssgd"],
)
def test_sgds_momentum_goes_on_where_it_is_the_same(method):
    here, local = torchs(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
    there = model()
    there.load_state_dict(here.state_dict())
    with method(there, model=there, settings=QUICK) as optimizer:
        optimizer.load_state_dict(local.state_dict())
        assert optimizer.param_groups[0]["lr"] == 0.05
        for step in range(3, 6):
            batch = make_data(seed=step, count=32)
            train_step(here, local, *batch)
            train_step(there, optimizer, *batch)
    for mine, expected in zip(there.parameters(), here.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def test_sgd_without_momentum_gives_its_rate_to_any_method():
    _, local = torchs(torch.optim.SGD, lr=0.05, weight_decay=0.01)
    mine = model()
    with METHODS["dgs"](mine) as optimizer:
        optimizer.load_state_dict(local.state_dict())
        group = optimizer.param_groups[0]
        assert [group[name] for name in ("lr", "weight_decay", "momentum", "density")] == [0.05, 0.01, 0.7, 0.01]
        train_step(mine, optimizer, *make_data(count=32))


@pytest.mark.parametrize(
    ("name", "kind", "options", "way_out"),
    [
        ("dgs", torch.optim.SGD, {"lr": 0.1, "momentum": 0.7}, "psclient.ASGD"),
        ("asgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.5}, "same momentum"),
        ("asgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "nesterov"),
        ("dgs", torch.optim.SGD, {"lr": 0.1, "maximize": True}, "maximize"),
        ("dgs", torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.7}, "another optimizer"),
        ("dgs", torch.optim.AdamW, {"lr": 0.1}, "weights alone.*Outer"),
        ("server", torch.optim.AdamW, {"lr": 0.1}, "moments begin anew.*--init"),
        ("outer", torch.optim.SGD, {"lr": 0.1}, "optimizer.inner_optimizer.load_state_dict"),
    ],
)
def test_what_has_no_place_is_refused_with_the_way_out(name, kind, options, way_out):
    _, local = torchs(kind, **options)
    with METHODS[name](model()) as optimizer:
        with pytest.raises(ConfigurationError, match=way_out):
            optimizer.load_state_dict(local.state_dict())
        assert not any(optimizer.state.values())


def test_a_servers_memory_that_a_fresh_server_lacks_is_missed_aloud(caplog, tmp_path):
    mine = model()
    with psclient.LocalServer(data_dir=tmp_path) as server:
        with METHODS["server"](mine, server=server, settings=QUICK) as optimizer:
            train_step(mine, optimizer, *make_data(count=32))
            state = optimizer.state_dict()
            optimizer.load_state_dict(state)
        server.processes[0].kill()
        server.restart()
        with METHODS["server"](model(), server=server, settings=QUICK) as optimizer:
            optimizer.load_state_dict(state)
        assert "begin anew" not in caplog.text
    with METHODS["server"](model(), settings=QUICK) as optimizer:
        optimizer.load_state_dict(state)
    assert caplog.text.count("moments and schedule of the server's optimizer begin anew") == 1
    assert "--init DIR" in caplog.text

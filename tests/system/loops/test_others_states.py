"""Loading a state that another method, optimizer or run has saved: taken over where that is exact, else refused."""

import pytest
import torch

import psclient
from psclient.errors import ConfigurationError
from tests.system.tools import assert_close, make_data, make_model, optimizer_of, train_step

OPTIONS = {
    "dgs": {},
    "dropping": {},
    "asgd": {"momentum": 0.9},
    "sgd": {},
    "outer": {"sync_every": 1},
}


def made(name, mine, **more):
    if name == "alone":
        return psclient.MomentumSGD(mine.parameters(), 0.1)
    return optimizer_of(name, mine, **OPTIONS[name], **more)


def model():
    return make_model(batch_norm=False)


def state_of(name):
    mine = model()
    with made(name, mine) as optimizer:
        train_step(mine, optimizer, *make_data(count=32))
        return optimizer.state_dict()


def torchs(kind, **options):
    mine = model()
    optimizer = kind(mine.parameters(), **options)
    for step in range(3):
        train_step(mine, optimizer, *make_data(seed=step, count=32))
    return mine, optimizer


@pytest.mark.parametrize(
    ("saved", "loaded"), [("dgs", "sgd"), ("dgs", "dropping"), ("dgs", "alone"), ("asgd", "outer")]
)
def test_a_state_of_another_method_is_refused(saved, loaded):
    state, mine = state_of(saved), model()
    optimizer = made(loaded, mine)
    with pytest.raises(ConfigurationError, match="inner" if loaded == "outer" else f"'{saved}'.*weights alone"):
        optimizer.load_state_dict(state)
    assert not any(optimizer.state.values())
    if loaded != "alone":
        optimizer.close()


@pytest.mark.parametrize("method", ["asgd", "ssgd"])
def test_sgds_momentum_goes_on_where_it_is_the_same(method):
    here, local = torchs(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
    there = model()
    there.load_state_dict(here.state_dict())
    with optimizer_of(method, there, lr=1.0, momentum=0.9) as optimizer:
        optimizer.load_state_dict(local.state_dict())
        assert optimizer.param_groups[0]["lr"] == 0.05
        for step in range(3, 6):
            batch = make_data(seed=step, count=32)
            train_step(here, local, *batch)
            train_step(there, optimizer, *batch)
    assert_close(there, here, 1e-5, 1e-6)


def test_sgd_without_momentum_gives_its_rate_to_any_method():
    _, local = torchs(torch.optim.SGD, lr=0.05, weight_decay=0.01)
    mine = model()
    with made("dgs", mine) as optimizer:
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
        ("sgd", torch.optim.AdamW, {"lr": 0.1}, "moments begin anew.*--init"),
        ("outer", torch.optim.SGD, {"lr": 0.1}, "optimizer.inner_optimizer.load_state_dict"),
    ],
)
def test_what_has_no_place_is_refused_with_the_way_out(name, kind, options, way_out):
    _, local = torchs(kind, **options)
    with made(name, model()) as optimizer:
        with pytest.raises(ConfigurationError, match=way_out):
            optimizer.load_state_dict(local.state_dict())
        assert not any(optimizer.state.values())


def test_a_servers_memory_that_a_fresh_server_lacks_is_missed_aloud(caplog, tmp_path):
    mine = model()
    with psclient.LocalServer(data_dir=tmp_path) as server:
        with made("sgd", mine, server=server) as optimizer:
            train_step(mine, optimizer, *make_data(count=32))
            state = optimizer.state_dict()
            optimizer.load_state_dict(state)
        server.processes[0].kill()
        server.restart()
        with made("sgd", model(), server=server) as optimizer:
            optimizer.load_state_dict(state)
        assert "begin anew" not in caplog.text
    with made("sgd", model()) as optimizer:
        optimizer.load_state_dict(state)
    assert caplog.text.count("moments and schedule of the server's optimizer begin anew") == 1
    assert "--init DIR" in caplog.text

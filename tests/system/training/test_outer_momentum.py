"""Outer with momentum and without rounds: the server's delayed Nesterov, and what is refused."""

import pytest
import torch

import psclient
from psclient.errors import ConfigurationError
from psclient.rpc.local_server import LocalServer
from tests.system.tools import QUICK, make_data, make_model, train_step

OPTIONS = {"lr": 0.7, "momentum": 0.9, "every": 2}


def outer(model, options=OPTIONS, **more):
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return psclient.Outer(inner, ("DelayedNesterov", options), sync_every=2, model=model, settings=QUICK, **more)


def flat(model):
    return torch.cat([parameter.detach().reshape(-1).double() for parameter in model.parameters()])


def test_two_workers_in_turn_get_the_paper_s_steps_through_a_restart(tmp_path):
    models = [make_model(batch_norm=False) for _ in range(2)]
    theta = flat(models[0])
    m = d = torch.zeros_like(theta)
    with (
        LocalServer(data_dir=tmp_path, snapshot_seconds=0.2) as server,
        outer(models[0], server=server, worker="a") as one,
        outer(models[1], server=server, worker="b") as other,
    ):
        for turn in range(8):
            model, optimizer = ((models[0], one), (models[1], other))[turn % 2]
            optimizer.pull()
            at_home = make_model(batch_norm=False)
            at_home.load_state_dict(model.state_dict())
            local = torch.optim.SGD(at_home.parameters(), lr=0.1)
            before = flat(model)
            for step in range(2):
                batch = make_data(seed=10 * turn + step, count=32)
                train_step(at_home, local, *batch)
                train_step(model, optimizer, *batch)
            s = before - flat(at_home)
            d, theta = d + s, theta - 0.7 * s / 2
            if turn % 2:
                m = 0.9 * m + d / 2
                theta, d = theta - 0.7 * 0.9 * m, torch.zeros_like(theta)
            torch.testing.assert_close(flat(model), theta, rtol=1e-4, atol=1e-5)
            if turn == 4:
                server.processes[0].kill()
                server.restart()


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"lr": 0.7, "momentum": 0.9}, {}),
        (OPTIONS | {"nesterov": True}, {}),
        (OPTIONS, {"rounds": psclient.Rounds()}),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_way_on(options, more):
    with pytest.raises(ConfigurationError, match="for workers without rounds"):
        outer(make_model(batch_norm=False), options, server="127.0.0.1:9", **more)

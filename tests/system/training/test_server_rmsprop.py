"""RMSprop by entries, through a real server: torch's steps, restarts, several workers, and what workers agree on."""

import pytest
import torch
from torch import nn

import psclient
from psclient.errors import ConfigurationError, RefusedError, SettingsMismatchError
from tests.system.tools import QUICK, make_data, make_model, same, train_step


def model(seed=0):
    return make_model(seed, batch_norm=False)


def rmsprop(mine, **options):
    return psclient.ServerRMSprop(mine.parameters(), **({"model": mine, "settings": QUICK, "lr": 0.01} | options))


@pytest.mark.long
def test_a_restarted_server_has_the_same_bits_as_one_that_was_not(tmp_path):
    models = [model(), model()]
    for mine, kills in zip(models, (True, False), strict=True):
        with (
            psclient.LocalServer(data_dir=tmp_path / str(kills), snapshot_seconds=0.2) as server,
            rmsprop(mine, density=0.1, alpha=0.6, server=server) as optimizer,
        ):
            for step in range(30):
                train_step(mine, optimizer, *make_data(seed=step, count=32))
                if kills and step % 10 == 5:
                    server.processes[0].kill()
                    server.restart()
    assert same(*models)


def test_sparse_gradients_train_and_replies_have_no_more_than_was_sent():
    mine = model()
    x, y = make_data(seed=5)
    before = nn.functional.cross_entropy(mine(x), y).item()
    with psclient.LocalServer() as server, rmsprop(mine, density=0.05, server=server) as optimizer:
        for step in range(60):
            train_step(mine, optimizer, *make_data(seed=step, count=64))
            assert optimizer.report.reply_mode == "exact"
            assert optimizer.report.pull_entries == optimizer.report.push_entries
    assert nn.functional.cross_entropy(mine(x), y).item() < 0.8 * before


def test_workers_agree_on_alpha_and_not_on_the_rate_of_now():
    with psclient.LocalServer() as server, rmsprop(model(), server=server) as first:
        with pytest.raises(SettingsMismatchError, match="optimizer"):
            rmsprop(model(), server=server, alpha=0.9)
        first.param_groups[0]["lr"] = 0.5
        first.param_groups[0]["weight_decay"] = 0.1
        mine = model()
        train_step(mine, rmsprop(mine, server=server, worker="second"), *make_data())


@pytest.mark.parametrize("options", [{"alpha": 1.0}, {"alpha": 0.1}, {"eps": 0.0}, {"eps": 1e300}])
def test_what_the_rule_cannot_do_is_refused_by_name(options):
    with pytest.raises(RefusedError, match=next(iter(options))):
        rmsprop(model(), **options)


def test_a_state_of_torch_s_is_refused_with_a_way_on():
    mine = model()
    with rmsprop(mine) as optimizer, pytest.raises(ConfigurationError, match="weights alone"):
        optimizer.load_state_dict(torch.optim.RMSprop(mine.parameters()).state_dict())

"""``torch.distributed.checkpoint`` saves and loads an optimizer's state, and pushes nothing for it."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import psclient
from psclient.errors import ConfigurationError
from tests.system.tools import QUICK, make_data, make_model, optimizer_of, train_step
from tests.tiers import long_but

RATE = 0.05


METHODS = {
    "dgs": {"density": 0.1},
    "dgc": {"density": 0.1},
    "asgd": {"momentum": 0.5},
    "ssgd": {"density": 0.1},
    "adamw": {"density": 0.1},
    "outer": {},
}


def made(name, server):
    model = make_model(batch_norm=False)
    model.unused = nn.Linear(3, 3)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    if name == "outer":  # of an inner optimizer with moments
        inner = torch.optim.AdamW(model.parameters(), lr=RATE)
        return model, psclient.Outer(
            inner, sync_every=2, density=0.1, model=model, server=server, worker="w", settings=QUICK
        )
    return model, optimizer_of(name, model, RATE, server=server, worker="w", **METHODS[name])


def memories(optimizer):
    state = copy.deepcopy(optimizer.state_dict()["state"])
    tensors = {}
    for key, found in state.items():
        flat = {**found, **found.get("inner", {})}
        tensors |= {(key, name): each for name, each in flat.items() if torch.is_tensor(each)}
    return tensors


@pytest.mark.parametrize("through_files", long_but([True], [True, False]))
@pytest.mark.parametrize("name", METHODS)
def test_a_state_comes_back_as_it_was_and_nothing_is_pushed(name, through_files, tmp_path):
    with psclient.LocalServer(down_mode="exact") as server:
        model, optimizer = made(name, server)
        with optimizer:
            assert get_optimizer_state_dict(model, optimizer)["param_groups"], "before the first step, too"
            assert optimizer.version == 0
            for seed in range(3):  # with local steps, one of them is not pushed
                train_step(model, optimizer, *make_data(seed))
            version, rates = optimizer.version, [group["lr"] for group in optimizer.param_groups]
            optimizer.param_groups[0]["lr"] = RATE / 2
            saved = get_optimizer_state_dict(model, optimizer)
            assert optimizer.version == version
            assert rates == [RATE]
            held = memories(optimizer)
            if through_files:
                dcp.save(saved, checkpoint_id=tmp_path / "state", no_dist=True)
        model, optimizer = made(name, server)
        with optimizer:
            if through_files:
                saved = get_optimizer_state_dict(model, optimizer)
                dcp.load(saved, checkpoint_id=tmp_path / "state", no_dist=True)
            set_optimizer_state_dict(model, optimizer, saved)
            assert optimizer.version == version
            assert optimizer.param_groups[0]["lr"] == RATE / 2
            found = memories(optimizer)
            assert found.keys() == held.keys()
            for key, each in held.items():
                assert torch.equal(found[key], each), key
            assert any(bool(each.any()) for each in held.values())
            train_step(model, optimizer, *make_data(9))
            assert all(bool(each.isfinite().all()) for each in memories(optimizer).values())


def test_a_state_of_another_method_is_refused_as_ever(tmp_path):
    with psclient.LocalServer(down_mode="exact") as server:
        model, optimizer = made("dgs", server)
        with optimizer:
            train_step(model, optimizer, *make_data())
            saved = get_optimizer_state_dict(model, optimizer)
    with psclient.LocalServer(down_mode="exact") as server:
        model, optimizer = made("dgc", server)
        with optimizer, pytest.raises(ConfigurationError, match="method 'dgs' has saved this state"):
            set_optimizer_state_dict(model, optimizer, saved)


def test_memories_that_a_checkpoint_has_left_out_are_told_of(caplog, tmp_path):
    with psclient.LocalServer(down_mode="exact") as server:
        model, optimizer = made("asgd", server)
        with optimizer:
            train_step(model, optimizer, *make_data())
            state = optimizer.state_dict()
            for each in state["state"].values():
                del each["momentum"]
            optimizer.load_state_dict(state)
    assert "this state was saved with momentum, and comes without" in caplog.text

"""What tensors are called: the same on every worker, compiled or wrapped or neither."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.nn.parallel import DistributedDataParallel

import psclient
from psclient.model.module import describe
from psclient.rpc.local_server import LocalServer
from tests.system.tools import QUICK, make_data, make_model, train_step


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first[0].weight


@pytest.mark.long
def test_a_compiled_model_has_the_names_of_the_plain_one():
    model = Tied()
    plain = describe(model, [])
    assert describe(torch.compile(model), []).layout.fingerprint == plain.layout.fingerprint
    model.first = torch.compile(model.first)
    assert describe(model, []).layout.fingerprint == plain.layout.fingerprint


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def inside_of_parts(wrap):
    def wrapped(model):
        model.first = wrap(model.first)
        model.second = wrap(model.second)
        return model

    return wrapped


WRAPPERS = {
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": DistributedDataParallel,
    "checkpoint_wrapper": checkpoint_wrapper,
    "offload_wrapper": offload_wrapper,
    "torch.compile": torch.compile,
    "compiled DistributedDataParallel": lambda model: torch.compile(DistributedDataParallel(model)),
    "DataParallel of checkpoint_wrapper": lambda model: nn.DataParallel(inside_of_parts(checkpoint_wrapper)(model)),
    "parts": inside_of_parts(nn.DataParallel),
    "apply_activation_checkpointing": lambda model: apply_activation_checkpointing(model) or model,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_model_has_the_names_of_the_plain_one(wrap, one_process):
    plain = describe(Tied(), [])
    wrapped = describe(wrap(Tied()), [])
    assert wrapped.layout == plain.layout
    assert [spec.name for spec in plain.layout.tensors()] == [
        *("first.0.weight", "first.0.bias", "first.1.weight", "first.1.bias", "second.bias"),
        *("first.1.running_mean", "first.1.running_var", "first.1.num_batches_tracked"),
    ]
    assert plain.layout.parameters[0].aliases == ("second.weight",)


def test_a_submodule_that_only_has_the_name_of_a_wrappers_keeps_it():
    class Engine(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)

    assert [spec.name for spec in describe(nn.DataParallel(Engine()), []).layout.parameters] == [
        "module.weight",
        "module.bias",
    ]


def test_parameters_without_their_model_have_the_names_of_the_plain_ones_too():
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    group = torch.optim.SGD(torch.compile(model).named_parameters(), lr=0.1).param_groups
    assert [spec.name for spec in describe(None, group).layout.parameters] == ["0.weight", "0.bias"]


def test_a_wrapped_worker_trains_with_a_plain_one_and_the_saved_model_is_the_plain_ones(tmp_path, one_process):
    plain, wrapped = make_model(0), DistributedDataParallel(make_model(1))
    options = {"lr": 0.1, "settings": QUICK}
    with LocalServer() as server, psclient.ASGD(wrapped.parameters(), model=wrapped, server=server, **options) as one:
        train_step(wrapped, one, *make_data())
        with psclient.ASGD(plain.parameters(), model=plain, server=server, worker="plain", **options) as two:
            train_step(plain, two, *make_data())
        psclient.save(server.server, tmp_path / "model.safetensors")
    make_model(2).load_state_dict(load_file(tmp_path / "model.safetensors"))

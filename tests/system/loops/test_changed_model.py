"""A model that is changed under its optimizer: what is still the same trains on, and anything else is said."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import psclient
from psclient.errors import ModelChangedError
from psclient.rpc.local_server import LocalServer
from tests.system.tools import QUICK, assert_same_parameters, make_data, make_model, train_step


@pytest.fixture(scope="module", params=["exact", "topk"])
def server(request):
    with LocalServer(down_mode=request.param, down_density=0.2, down_dense_below=0, buffer_period_steps=1) as running:
        yield running


@pytest.fixture
def fresh_server():
    with LocalServer(down_mode="exact", buffer_period_steps=1) as running:
        yield running


@pytest.fixture(params=[False, True], ids=["", "overlap"])
def trained(request, server):
    """A model and its optimizer after a few steps."""
    model = make_model()
    options = {"density": 0.1, "model": model, "server": server, "worker": request.node.name, "settings": QUICK}
    with psclient.DGS(model.parameters(), lr=0.1, momentum=0.3, overlap=request.param, **options) as optimizer:
        for _ in range(3):
            train_step(model, optimizer, *make_data())
        yield model, optimizer


def backward(model, x):
    nn.functional.cross_entropy(model(x).float(), make_data()[1]).backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_another_dtype_is_said_and_nothing_is_pushed(trained, dtype):
    model, optimizer = trained
    before, name = optimizer.version, str(dtype).removeprefix("torch.")
    model.to(dtype)
    optimizer.zero_grad()
    backward(model, make_data()[0].to(dtype))
    for call in (optimizer.step, optimizer.step, optimizer.pull):
        with pytest.raises(ModelChangedError, match=rf"0\.weight.*{name}.*make a new one") as caught:
            call()
        assert caught.value.tensor == "0.weight"
    assert optimizer.version <= before + 1  # with overlap a reply may have come


def test_closing_and_saving_go_on_working_with_another_dtype(trained):
    model, optimizer = trained
    model.double()
    assert optimizer.state_dict()["state"]
    optimizer.flush()
    optimizer.close()


def test_a_new_optimizer_takes_over(trained, server):
    model, optimizer = trained
    saved = copy.deepcopy(model)
    model.double()
    with pytest.raises(ModelChangedError):
        optimizer.step()
    optimizer.close()
    options = {"density": 0.1, "model": saved, "server": server, "settings": QUICK}
    with psclient.DGS(saved.parameters(), lr=0.1, momentum=0.3, **options) as again:
        train_step(saved, again, *make_data())


@pytest.mark.parametrize("method", ["dgs", "outer"])
def test_a_pull_of_a_model_that_is_as_it_was_asks_for_nothing_more(fresh_server, method, caplog):
    model = make_model(batch_norm=False)
    options = {"density": 0.01, "model": model, "server": fresh_server, "settings": QUICK}
    if method == "dgs":
        optimizer = psclient.DGS(model.parameters(), lr=0.1, **options)
    else:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = psclient.Outer(inner, None, sync_every=2, **options)
    with optimizer:
        whole = optimizer.totals.upload_bytes
        for _ in range(5):
            train_step(model, optimizer, *make_data())
            before = optimizer.totals.pull_bytes
            optimizer.pull()
            assert optimizer.totals.pull_bytes - before < whole / 5
    assert "written to" not in caplog.text


SAME_VALUES = {
    "copied": lambda model: [setattr(p, "data", p.data.clone()) for p in model.parameters()],
    "away and back": lambda model: model.double().float(),
    "other strides": lambda model: setattr(model[0].weight, "data", model[0].weight.data.t().contiguous().t()),
    "shared": lambda model: model.share_memory(),
}


@pytest.mark.parametrize("change", SAME_VALUES)
def test_memory_with_the_same_values_trains_on(trained, server, change):
    model, optimizer = trained
    for _ in range(3):
        SAME_VALUES[change](model)
        train_step(model, optimizer, *make_data())
    optimizer.pull()
    if optimizer.report.reply_mode == "exact":
        assert_same_parameters(model, server.server)


def test_a_parameter_that_was_replaced_in_its_module_is_said(trained):
    model, optimizer = trained
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.raises(ModelChangedError, match=r"0\.weight.*another Parameter.*new optimizer"):
        train_step(model, optimizer, *make_data())


def test_a_parameter_that_was_renamed_trains_on(trained):
    model, optimizer = trained
    prune.identity(model[0], "weight")
    before = model[0].weight_orig.detach().clone()
    for _ in range(2):
        train_step(model, optimizer, *make_data())
    assert not torch.equal(model[0].weight_orig, before)


# Buffers


def dgs(model, server, worker):
    options = {"density": 0.1, "model": model, "server": server, "worker": worker, "settings": QUICK}
    return psclient.DGS(model.parameters(), lr=0.1, momentum=0.3, **options)


def test_a_buffer_that_is_replaced_stays_synchronised(fresh_server):
    model, other = make_model(), make_model()
    with dgs(model, fresh_server, "a") as optimizer, dgs(other, fresh_server, "b") as observer:
        train_step(model, optimizer, *make_data())
        for module in (model, other):
            module[1].running_mean = torch.full((32,), 1000.0)
        train_step(model, optimizer, *make_data())
        assert psclient.download(fresh_server.server)["1.running_mean"].mean() > 100, "the new tensor travels"
        train_step(other, observer, *make_data())
        assert not torch.equal(other[1].running_mean, torch.full((32,), 1000.0)), "the average arrives in the new one"


def test_a_buffer_that_is_replaced_is_uploaded(fresh_server):
    model = make_model()
    with dgs(model, fresh_server, "w") as optimizer:
        train_step(model, optimizer, *make_data())
        model[1].running_mean = torch.full((32,), 1000.0)
        fresh_server.processes[0].kill()
        fresh_server.restart(0)
        optimizer.pull()
        assert psclient.download(fresh_server.server)["1.running_mean"].mean() == 1000


@pytest.mark.parametrize(
    "replacement", [torch.zeros(31), torch.zeros(32, dtype=torch.float64), None], ids=["shape", "dtype", "none"]
)
def test_a_buffer_of_another_kind_is_said_before_anything_is_pushed(fresh_server, replacement):
    model = make_model()
    with dgs(model, fresh_server, "w") as optimizer:
        train_step(model, optimizer, *make_data())
        right = model[1].running_mean
        model[1].running_mean = replacement
        with pytest.raises(ModelChangedError, match=r"1\.running_mean"):
            optimizer.step()
        assert optimizer.version == 1
        model[1].running_mean = right
        train_step(model, optimizer, *make_data())
        assert optimizer.version == 2


def test_buffers_that_never_travel_may_be_anything():
    with LocalServer(buffers="none", buffer_period_steps=1) as server:
        model = make_model()
        with dgs(model, server, "w") as optimizer:
            train_step(model, optimizer, *make_data())
            model[1].running_mean = model[1].running_mean.double()
            model[1].running_var = model[1].running_var.double()
            optimizer.step()
            assert optimizer.version == 2

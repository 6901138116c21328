"""A model is its author's: saved, copied, scripted, exported or compiled, nothing of psclient is in it."""

import copy
import gc
import io
import itertools
import subprocess
import sys

import pytest
import torch
import torch._dynamo
from torch import nn

import psclient
from psclient.rpc.local_server import LocalServer
from tests.system.tools import QUICK, engine_of, make_data, make_model, train_step, wait_until

X, Y = make_data(count=6)
LOADING = """
import sys
sys.modules["psclient"] = None
import torch
with torch.serialization.safe_globals([torch.nn.Sequential, torch.nn.Linear, torch.nn.ReLU, set]):
    print(torch.load(sys.argv[1], weights_only=True))
"""


class Net(nn.Sequential):
    """Of the same tensors as a plain ``Sequential``, so that one server has both."""

    def __init__(self):
        super().__init__(*make_model(batch_norm=False))

    def forward(self, x):
        for each in self:
            x = each(x)
        return x


class Inner(Net):
    """Of a class whose calls nobody else in these tests counts."""


@pytest.fixture(scope="module")
def server():
    with LocalServer(down_mode="exact") as running:
        yield running


@pytest.fixture
def optimizer(server):
    """Of ``model``, an attribute of it."""
    made = []

    def make(model, **options):
        options = {"lr": 0.1, "model": model, "settings": QUICK, "server": server} | options
        made.append(psclient.ASGD(model.parameters(), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def counted(optimizer, call, steps=3):
    """Return the samples that are counted for each step of a loop that calls this."""
    found = []
    for _ in range(steps):
        before = optimizer.totals.samples
        train_step(call, optimizer, X, Y)
        found.append(optimizer.totals.samples - before)
    return found


def test_a_saved_model_loads_without_psclient_and_with_weights_only(optimizer, tmp_path):
    model = make_model(batch_norm=False)
    counted(optimizer(model), model)
    torch.save(model, tmp_path / "model.pt")
    done = subprocess.run(
        [sys.executable, "-c", LOADING, tmp_path / "model.pt"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Linear" in done.stdout


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_calls_of_a_copy_are_not_counted(optimizer, copied):
    model = Net()
    made = optimizer(model)
    copied(model)(X)
    assert counted(made, model) == [6, 6, 6]


def test_a_copy_with_an_optimizer_of_its_own_is_counted_once(optimizer):
    first = Net()
    made = optimizer(first)
    assert counted(made, first) == [6, 6, 6]
    second = copy.deepcopy(first)
    assert counted(optimizer(second, worker="second"), second) == [6, 6, 6]
    assert made.totals.samples == 18


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_a_model_can_be_scripted_traced_exported_and_saved_in_training(optimizer, overlap):
    model = Net()
    made = optimizer(model, overlap=overlap)
    wanted = model(X)
    before = engine_of(made).samples_waiting
    forms = {
        "script": torch.jit.script(model),
        "trace": torch.jit.trace(model, X, check_trace=False),  # a check would call the model
        "export": torch.export.export(model, (X,), dynamic_shapes=({0: torch.export.Dim.AUTO},)).module(),
        "strict": torch.export.export(model, (X,), strict=True).module(),
        "fx": torch.fx.symbolic_trace(model),
    }
    for name, form in forms.items():
        assert torch.allclose(form(X), wanted, atol=1e-6), name
    for name in ("script", "trace"):
        torch.jit.save(forms[name], io.BytesIO())
    assert "psclient" not in str(forms["fx"].code) + str(forms["script"].code) + str(forms["export"].graph)
    assert engine_of(made).samples_waiting == before, "a model that is traced trains nothing"
    made.zero_grad()


def plain():
    return make_model(batch_norm=False)


@pytest.mark.parametrize(
    ("given", "make"),
    [
        *itertools.product(["inner", "inner, compiled before", "compiled"], [Net, plain]),
        ("in place", Net),  # of its own modules torch compiles none in place
    ],
)
def test_a_compiled_model_is_one_graph_that_is_compiled_once_and_counted(optimizer, given, make):
    model, made = make(), None
    if given in ("inner", "in place"):
        made = optimizer(model)
    if given == "in place":
        model.compile(backend="eager", fullgraph=True)
        called = model
    else:
        called = torch.compile(model, backend="eager", fullgraph=True)
    if given == "inner, compiled before":
        called(X).sum().backward()
    made = made or optimizer(called if given == "compiled" else model)
    assert counted(made, called, 6) == [6] * 6
    found = torch._dynamo.utils.counters
    assert found["stats"]["unique_graphs"] == 1
    assert not found["graph_break"]
    explained = torch._dynamo.explain(make())(X)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


def test_a_compiled_function_around_the_model_is_one_graph(optimizer):
    model = Net()
    made = optimizer(model)
    called = torch.compile(lambda x: model(x) * 2, backend="eager", fullgraph=True)
    counted(made, called)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.long
def test_many_compiled_models_do_not_share_a_limit(optimizer):
    for number in range(12):
        kind = type(f"Net{number}", (Net,), {})
        model = kind()
        made = optimizer(model, worker=str(number))
        called = torch.compile(model, backend="eager", fullgraph=True)
        assert counted(made, called, 2) == [6, 6]
        made.close()


@pytest.mark.long
def test_inside_distributed_and_data_parallel_a_batch_counts_once(optimizer, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for wrapper in (nn.parallel.DistributedDataParallel, nn.DataParallel):
            model = Net()
            wrapped = wrapper(model)
            for number, (given, called) in enumerate(
                [(model, wrapped), (wrapped, wrapped), (model, torch.compile(wrapped, backend="eager"))]
            ):
                with optimizer(given, worker=f"{wrapper.__name__}{number}", server="local") as made:
                    assert counted(made, called) == [6, 6, 6]
    finally:
        torch.distributed.destroy_process_group()


def test_activations_that_are_computed_again_count_once(optimizer):
    from torch.utils.checkpoint import checkpoint

    model = Net()
    made = optimizer(model)
    assert counted(made, lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=False)) == [6, 6, 6]


def test_calls_without_gradients_train_nothing_and_do_not_count(optimizer):
    model = Net()
    made = optimizer(model)

    def acts_and_learns(x):
        with torch.no_grad():
            model(x)
        return model(x)

    assert counted(made, acts_and_learns) == [6, 6, 6]


@pytest.mark.parametrize("how", ["closed", "dropped", "refused"])
def test_nothing_is_left_at_the_class(optimizer, server, how):
    model = Inner()
    known = {kind: vars(kind).get("__call__") for kind in (nn.Linear, nn.Sequential, torch._dynamo.OptimizedModule)}
    made = psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server, worker=how, settings=QUICK)
    counted(made, model)
    assert "__call__" in vars(Inner)
    if how == "closed":
        made.close()
    elif how == "refused":
        with pytest.raises(psclient.errors.SettingsMismatchError):
            psclient.ASGD(model.parameters(), lr=0.1, momentum=0.5, model=model, server=server, settings=QUICK)
        made.close()
    del made
    gc.collect()
    wait_until(lambda: "__call__" not in vars(Inner))
    assert {kind: vars(kind).get("__call__") for kind in known} == known

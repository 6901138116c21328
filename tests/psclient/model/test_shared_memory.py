"""Tensors that lie in one another's memory: tied by object or not at all."""

import pytest
import torch
from torch import nn

import psclient
from psclient.errors import ConfigurationError, ModelChangedError
from psclient.model.memory import first_shared
from psclient.model.module import describe
from psclient.rpc.local_server import LocalServer
from tests.system.tools import QUICK


class Tied(nn.Module):
    """An encoder and a decoder; ``tie`` makes the two share memory."""

    def __init__(self, tie):
        super().__init__()
        self.e, self.d = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        tie(self)

    def forward(self, x):
        return self.d(self.e(x))


def transposed(model):
    model.d.weight = nn.Parameter(model.e.weight.data.t())


def overlapping(model):
    model.d.weight = nn.Parameter(model.e.weight.data[2:7])


def assigned(model):
    model.d.weight.data = model.e.weight.data


def strided(model):
    model.d.weight = nn.Parameter(model.e.weight.data[:, ::2])


def other_dtype(model):
    model.d.weight = nn.Parameter(model.e.weight.data.view(torch.bfloat16))


PARAMETERS = {
    "nn.Parameter of .data": lambda model: setattr(model.d, "weight", nn.Parameter(model.e.weight.data)),
    ".data =": assigned,
    "frozen": lambda model: setattr(model.d, "weight", nn.Parameter(model.e.weight.data, requires_grad=False)),
    "transposed": transposed,
    "overlapping": overlapping,
    "strided": strided,
    "another dtype": other_dtype,
}


@pytest.mark.parametrize("tie", PARAMETERS.values(), ids=PARAMETERS)
def test_two_parameters_in_the_same_memory_are_refused_by_name(tie):
    with pytest.raises(ConfigurationError, match=r"'d\.weight'.*'e\.weight'.*same memory.*clone\(\)"):
        describe(Tied(tie), [])


def test_that_is_said_before_anything_is_sent():
    model = Tied(assigned)
    for make in (
        lambda: psclient.DGS(model.parameters(), lr=0.1, model=model, server="127.0.0.1:9", settings=QUICK),
        lambda: psclient.DGS(model.parameters(), lr=0.1, server="127.0.0.1:9", settings=QUICK),
        lambda: psclient.Outer(torch.optim.SGD(model.parameters()), sync_every=1, server="127.0.0.1:9", model=model),
    ):
        with pytest.raises(ConfigurationError, match="same memory"):
            make()


@pytest.mark.parametrize(
    "register",
    [
        lambda model: model.register_buffer("w0", model.e.weight.detach()[0]),
        lambda model: model.register_buffer("w0", model.e.weight.data),
    ],
    ids=["a row", "all"],
)
def test_a_buffer_in_a_parameters_memory_is_refused_by_name(register):
    with pytest.raises(ConfigurationError, match=r"buffer 'w0'.*'e\.weight'.*persistent=False"):
        describe(Tied(register), [])


def flat_views(model):
    """Parameters one behind the other in one flat tensor, and interleaved in another."""
    flat = torch.randn(60 + 60)
    model.e.weight.data = flat[:60].view(10, 6)
    model.d.weight.data = flat[60:].view(10, 6)
    columns = torch.randn(8, 6)
    model.left, model.right = nn.Parameter(columns[:, :3]), nn.Parameter(columns[:, 3:])


ALLOWED = {
    "tied by object": lambda model: setattr(model.d, "weight", model.e.weight),
    "views of one flat tensor": flat_views,
    "a buffer that is not saved": lambda model: model.register_buffer("w", model.e.weight.data, persistent=False),
    "frozen ones": lambda model: (
        setattr(model, "a", nn.Parameter(torch.ones(3), requires_grad=False)),
        setattr(model, "b", nn.Parameter(model.a.data[1:], requires_grad=False)),
    ),
    "empty ones": lambda model: setattr(model, "none", nn.Parameter(model.e.weight.data[:0])),
    "an LSTM": lambda model: setattr(model, "lstm", nn.LSTM(3, 3, 2)),
}


@pytest.mark.parametrize("tie", ALLOWED.values(), ids=ALLOWED)
def test_what_has_no_element_in_common_is_trained(tie):
    describe(Tied(tie), [])


def test_an_expanded_parameter_is_refused_by_name():
    with pytest.raises(ConfigurationError, match=r"'scale'.*expand.*clone\(\)"):
        describe(Tied(lambda model: setattr(model, "scale", nn.Parameter(torch.ones(1).expand(3)))), [])


def test_parameters_that_are_given_the_same_memory_later_are_said():
    model = Tied(lambda _: None)
    with (
        LocalServer() as server,
        psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server, settings=QUICK) as optimizer,
    ):
        assigned(model)
        model(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(ModelChangedError, match=r"'d\.weight'.*'e\.weight'"):
            optimizer.step()


def test_what_is_shared_is_found_among_many_without_comparing_all_pairs():
    flat = torch.zeros(5001 * 4)
    tensors = [flat[4 * n : 4 * n + 4] for n in range(5000)]
    assert first_shared(tensors, written=5000) is None
    assert first_shared([*tensors, flat[41:42]], written=5000) == (10, 5000)
    assert first_shared([*tensors, flat[41:42], flat[41:43]], written=0) is None

"""WAGMA's worker: local SGD with momentum, whose change is pushed whole or in part; nothing of it is lost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import psclient
from psclient.compress.choice import Choice
from psclient.errors import ConfigurationError
from psclient.optim.wagma import WAGMA
from pscore.select import SELECTORS
from tests.psclient.method_makers import EPS, OneTensor, dense, gradients, whole

SIZE = 60


def group(density=1.0, **options):
    return {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "nesterov": False, "density": density} | options


@pytest.fixture(params=["compiled", "tensor by tensor"])
def tensor(request):
    return one_tensor("warm", 0 if request.param == "compiled" else 1 << 20)


def one_tensor(selector, compiled_from=0):
    return OneTensor(WAGMA, torch.zeros(SIZE), Choice(SELECTORS[selector], "tensor", 0, compiled_from=compiled_from))


@pytest.mark.parametrize("options", [{"nesterov": True}, {"weight_decay": 0.1}, {"momentum": 0.0}])
def test_a_dense_change_is_a_step_of_torch_sgd(options, tensor):
    hyper = group(**options)
    parameter, scale = nn.Parameter(torch.randn(SIZE)), torch.zeros(SIZE)
    sgd = torch.optim.SGD([parameter], lr=0.1, **{"momentum": 0.9} | options)
    theta = parameter.detach().clone()
    for g in gradients(SIZE, 25):
        with torch.no_grad():
            parameter.copy_(theta)
        parameter.grad = g
        sgd.step()
        sent = tensor.push(g, hyper, 1.0, theta)
        assert sent.offsets is None
        scale = 0.9 * scale + 0.2 * g.abs() + 0.01 * theta.abs()
        theta = theta - sent.values
        assert bool(((theta - parameter.detach()).abs() <= 4 * EPS * (theta.abs() + scale)).all())


@given(
    st.lists(st.tuples(st.sampled_from([0.02, 0.3, 1.0]), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=12),
    st.booleans(),
    st.integers(0, 99),
    st.sampled_from([0, 1 << 20]),
)
@settings(deadline=None, max_examples=60)
def test_what_was_accumulated_is_applied_or_still_held(history, nesterov, seed, compiled_from):
    """Through densities that change and pushes that come back: sum lr·u = sum applied + r."""
    generator = torch.Generator().manual_seed(seed)
    tensor, u = one_tensor("warm", compiled_from), torch.zeros(SIZE).double()
    accumulated, applied, size = (torch.zeros(SIZE).double() for _ in range(3))
    for density, refused in history:
        hyper = group(density, nesterov=nesterov)
        g = torch.randn(SIZE, generator=generator)
        payload = dense(tensor.push(g, hyper, density), SIZE)
        u = 0.9 * u + g.double()
        accumulated += 0.1 * (g + 0.9 * u if nesterov else u)
        back = torch.where(torch.rand(SIZE, generator=generator) < refused, payload, 0)
        tensor.come_back(hyper, whole(back))
        applied += (payload - back).double()
        size += payload.abs() + u.abs()
    held = tensor.state["residual"].double()
    assert bool(((accumulated - applied - held).abs() <= 8 * EPS * len(history) * (size + 1)).all())
    last = dense(tensor.flush(group()), SIZE)
    assert bool(((accumulated - applied - last.double()).abs() <= 8 * EPS * len(history) * (size + 1)).all())


def test_a_sparse_change_is_the_largest_part_of_the_residual():
    tensor, hyper = one_tensor("exact"), group(0.1)
    residual, u = torch.zeros(SIZE), torch.zeros(SIZE)
    for g in gradients(SIZE, 8):
        u = 0.9 * u + g
        residual += 0.1 * u
        sent = tensor.push(g, hyper, 0.1)
        assert sorted(sent.offsets.tolist()) == sorted(residual.abs().topk(6).indices.tolist())
        residual[sent.offsets] = 0


@pytest.mark.parametrize(
    "options",
    [{"group_size": 1}, {"group_size": -2}, {"tau": -1}, {"late": "never"}, {"nesterov": True, "momentum": 0}],
)
def test_arguments_that_make_no_sense_are_named_before_anything_is_dialled(options):
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        psclient.WAGMA(nn.Linear(2, 2).parameters(), lr=0.1, server="127.0.0.1:1", **options)

"""Numbers that are none: hyper-parameters that a schedule has broken, and memories with NaN. Neither stays unsaid."""

import copy
import itertools

import pytest
import torch
from torch import nn

import psclient
from psclient.errors import ConfigurationError, NonFiniteGradientError
from tests.system.tools import QUICK
from tests.tiers import long_but

METHODS = {
    "asgd": (psclient.ASGD, {"momentum": 0.5}),
    "dgs": (psclient.DGS, {"density": 0.1}),
    "dgc": (psclient.DGC, {"density": 0.1}),
    "gradient_dropping": (psclient.GradientDropping, {"density": 0.1}),
    "ssgd": (psclient.SSGD, {"density": 0.1}),
    "server_rmsprop": (psclient.ServerRMSprop, {"density": 0.1}),
}
NAN, INFINITE = float("nan"), float("inf")
BROKEN = (
    *(("lr", NAN), ("lr", INFINITE), ("lr", "0.1"), ("lr", 1e39), ("weight_decay", NAN), ("weight_decay", -0.1)),
    *(("momentum", 1.5), ("momentum", NAN), ("density", NAN), ("density", 1.5)),
)


def make(name, server, size, **options):
    method, own = METHODS[name]
    parameters = [nn.Parameter(torch.ones(size)), nn.Parameter(torch.ones(30))]
    settings = QUICK.model_copy(update={"bucket_bytes": 1})
    return parameters, method(parameters, lr=0.1, server=server, settings=settings, **own, **options)


def backward(parameters, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = None
    sum((parameter * torch.randn(parameter.shape, generator=generator)).sum() for parameter in parameters).backward()


def memories(optimizer):
    """All residuals and momenta, by parameter and name."""
    state = copy.deepcopy(optimizer.state_dict()["state"])
    return {(key, name): each for key, found in state.items() for name, each in found.items() if torch.is_tensor(each)}


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for key, each in wanted.items():
        assert torch.equal(found[key], each), key


def sound(optimizer):
    return all(bool(each.isfinite().all()) for each in memories(optimizer).values())


@pytest.mark.parametrize("overlap", long_but([True], [False, True]))
@pytest.mark.parametrize("name", ["asgd", "dgs", "dgc", "gradient_dropping", "server_rmsprop"])
def test_a_step_with_a_broken_hyper_parameter_is_refused_and_changes_nothing(server, name, overlap):
    parameters, optimizer = make(name, server, 20_000, overlap=overlap)
    with optimizer:
        group = optimizer.param_groups[0]
        for seed in range(2):
            backward(parameters, seed)
            optimizer.step()
        for key, value in BROKEN:
            if key not in group:
                continue
            optimizer.pull()
            held, values = memories(optimizer), [parameter.detach().clone() for parameter in parameters]
            before, version, samples = group[key], optimizer.version, optimizer.totals.samples
            group[key] = value
            backward(parameters, 2)
            with pytest.raises(ConfigurationError, match=rf"{key} of param group 0 .*step\(\) again"):
                optimizer.step()
            assert_equal(memories(optimizer), held)
            assert all(map(torch.equal, parameters, values))
            assert (optimizer.version, optimizer.totals.samples) == (version, samples)

            group[key] = before
            optimizer.step()
            optimizer.pull()
            assert optimizer.version == version + 1
            assert sound(optimizer)


def test_one_of_several_groups_is_named_and_a_flush_is_refused_too(server):
    model = nn.Sequential(nn.Linear(20, 5), nn.Linear(5, 4))
    groups = [{"params": each.parameters()} for each in model]
    with psclient.DGC(groups, lr=0.1, model=model, server=server, settings=QUICK) as optimizer:
        backward(list(model.parameters()))
        optimizer.step()
        held = memories(optimizer)
        optimizer.param_groups[1]["lr"] = NAN
        for call in (optimizer.step, optimizer.flush, optimizer.lookahead().__enter__):
            with pytest.raises(ConfigurationError, match="lr of param group 1 is nan"):
                call()
            assert_equal(memories(optimizer), held)


def test_a_schedule_of_densities_and_a_clip_norm_that_are_no_numbers_are_refused(server):
    parameters = [nn.Parameter(torch.ones(100))]
    with pytest.raises(ConfigurationError, match="clip_norm"):
        psclient.DGC(parameters, lr=0.1, server=server, settings=QUICK, clip_norm=NAN)
    densities = iter([0.1, 0.1, NAN, 0.1, 0.1])
    with psclient.DGC(
        parameters, lr=0.1, density=lambda _: next(densities), clip_norm=1.0, server=server, settings=QUICK
    ) as optimizer:
        backward(parameters)
        optimizer.step()
        held = memories(optimizer)
        for broken in (lambda: None, lambda: setattr(optimizer, "clip_norm", NAN)):
            broken()
            with pytest.raises(ConfigurationError, match=r"density|clip_norm"):
                optimizer.step()
            assert_equal(memories(optimizer), held)
        optimizer.clip_norm = 1.0
        optimizer.step()
        assert sound(optimizer)


def test_a_broken_rate_of_an_inner_optimizer_leaves_its_moments_and_the_model_alone(server):
    parameters = [nn.Parameter(torch.ones(100))]
    inner = torch.optim.AdamW(parameters, lr=0.1)
    with psclient.Outer(inner, sync_every=2, server=server, settings=QUICK) as optimizer:
        for key, value in (("lr", NAN), ("weight_decay", NAN), ("betas", (0.9, NAN))):
            backward(parameters)
            optimizer.step()
            before, moments = inner.param_groups[0][key], copy.deepcopy(inner.state_dict()["state"])
            values = parameters[0].detach().clone()
            inner.param_groups[0][key] = value
            with pytest.raises(ConfigurationError, match=f"{key} of param group 0"):
                optimizer.step()
            inner.param_groups[0][key] = before
            assert torch.equal(parameters[0], values)
            found = inner.state_dict()["state"]
            assert all(torch.equal(found[0][name], each) for name, each in moments[0].items())
            optimizer.step()


@pytest.mark.parametrize("size", long_but([20_000], [200, 20_000]))
@pytest.mark.parametrize("name", METHODS)
def test_a_number_that_is_none_in_a_memory_is_said_and_cleared(server, name, size):
    parameters, optimizer = make(name, server, size)
    with optimizer:
        for seed in range(3):
            backward(parameters, seed)
            optimizer.step()
        found = optimizer.state[parameters[0]].keys() & {"residual", "momentum"}
        assert found
        for memory, bad in itertools.product(sorted(found), (slice(7, 8), slice(None))):
            version = optimizer.version
            optimizer.state[parameters[0]][memory][bad] = NAN
            backward(parameters, 3)
            with pytest.raises(NonFiniteGradientError, match="'parameter_0'"):
                optimizer.step()
            assert optimizer.version == version
            assert sound(optimizer)
            for seed in range(4, 8):
                backward(parameters, seed)
                optimizer.step()
            assert optimizer.version == version + 4
            assert sound(optimizer)


@pytest.mark.parametrize("value", [NAN, INFINITE])
def test_a_state_with_a_number_that_is_none_is_not_loaded(server, value):
    parameters, optimizer = make("dgc", server, 100)
    with optimizer:
        backward(parameters)
        optimizer.step()
        held = memories(optimizer)
        for memory in ("residual", "momentum"):
            state = copy.deepcopy(optimizer.state_dict())
            state["state"][0][memory][3] = value
            with pytest.raises(ConfigurationError, match=rf"{memory} of 'parameter_0'.* not finite"):
                optimizer.load_state_dict(state)
        state = copy.deepcopy(optimizer.state_dict())
        state["state"][0]["residual"] = torch.zeros(99)
        with pytest.raises(ConfigurationError, match="residual of 'parameter_0' has 99 elements"):
            optimizer.load_state_dict(state)
        state = copy.deepcopy(optimizer.state_dict())
        state["param_groups"][0]["lr"] = value
        with pytest.raises(ConfigurationError, match="lr"):
            optimizer.load_state_dict(state)
        assert_equal(memories(optimizer), held)

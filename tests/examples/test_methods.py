"""Every method by its name on the command line, against a real server."""

import argparse
from dataclasses import replace

import pytest
import torch
from support import checkpoints, methods
from support.evaluation import ServersModel
from support.launch import Place
from support.samplers import EqualShares, make_sampler
from torch.utils.data import DataLoader, TensorDataset

import psclient
from tests.system.tools import make_data, make_model
from tests.tiers import long_but

LENGTH = methods.Length(epochs=2, steps_per_epoch=8, warmup_epochs=0.5)


def parse(*arguments):
    parser = argparse.ArgumentParser()
    methods.add_arguments(parser, lr=0.05, batch_size=16, epochs=2)
    return parser.parse_args(arguments)


def place(server, out, resume=False, workers=1):
    return Place(server, "worker-0", 0, workers, torch.device("cpu"), out, resume)


def epoch(model, optimizer, clock, loader):
    rates = []
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        clock.step()
        inner = getattr(optimizer, "inner", optimizer)
        rates.append(inner.param_groups[0].get("lr"))
    return rates


@pytest.mark.parametrize("name", long_but(["dgs", "outer", "ssgd"], methods.METHODS))
def test_each_method_trains_and_follows_its_schedule(tmp_path, name):
    options = parse("--method", name, "--period", "2", "--density", "0.5")
    data = TensorDataset(*make_data(count=128))
    model = make_model()
    with psclient.LocalServer() as server:
        optimizer, clock = methods.make_optimizer(options, model, place(server.server, tmp_path), LENGTH)
        sampler = make_sampler(name, data, optimizer, place(server.server, tmp_path), 0, 0)
        assert isinstance(sampler, EqualShares) == (name in ("momentum-sgd", "wagma"))
        loader = DataLoader(data, 16, sampler=sampler)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        rates = [rate for _ in sampler.epochs(2) for rate in epoch(model, optimizer, clock, loader)]
        assert len(rates) == 16
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        if name == "server-optimizer":
            assert set(rates) == {0.05}, "the schedule is the server's"
        else:
            assert max(rates) <= 0.05 + 1e-9
            assert rates[-1] < 0.2 * max(rates)
        ServersModel(model, optimizer, place(server.server, tmp_path)).save(tmp_path / "model.safetensors")
        if hasattr(optimizer, "close"):
            optimizer.close()


def test_at_home_means_one_worker(tmp_path):
    with pytest.raises(psclient.errors.ConfigurationError, match="--workers 1"):
        methods.make_optimizer(parse("--method", "momentum-sgd"), make_model(), place("", tmp_path, workers=2), LENGTH)


@pytest.mark.parametrize("schedule", ["cosine", "step"])
def test_a_run_at_home_goes_on_where_it_was(tmp_path, schedule):
    """The same values as without the stop: model, momentum and rate come back, and the epoch that comes next."""
    options = parse("--method", "momentum-sgd", "--schedule", schedule)
    data = TensorDataset(*make_data(count=128))

    def run(out, until, resume):
        model = make_model()
        here = place("", out, resume)
        optimizer, clock = methods.make_optimizer(options, model, here, LENGTH)
        start = checkpoints.load(here, optimizer, clock, model)
        sampler = make_sampler("momentum-sgd", data, optimizer, here, 0, start)
        for number in sampler.epochs(until):
            epoch(model, optimizer, clock, DataLoader(data, 16, sampler=sampler))
            checkpoints.save(here, optimizer, clock, model, number + 1)
        return model

    whole = run(tmp_path / "whole", 2, False)
    run(tmp_path / "parts", 1, False)
    parts = run(tmp_path / "parts", 2, True)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "schedule"),
    long_but([("dgs", "cosine")], [("dgs", "cosine"), ("dgs", "step"), ("outer", "cosine"), ("ssgd", "step")]),
)
def test_a_worker_that_is_resumed_goes_on_at_the_rate_of_the_run(tmp_path, name, schedule):
    """Its saved state has the rate as it was lowered by then, which is not lowered again."""
    options = parse("--method", name, "--period", "1", "--density", "0.5", "--schedule", schedule)
    length = replace(LENGTH, warmup_epochs=0.0, drops=(0.5, 1.5))
    data = TensorDataset(*make_data(count=128))

    def run(server, out, resume, stops):
        model = make_model()
        here = place(server, out, resume)
        optimizer, clock = methods.make_optimizer(options, model, here, length)
        checkpoints.load(here, optimizer, clock, model)
        rates = []
        for number in stops:
            rates += epoch(model, optimizer, clock, DataLoader(data, 16))
            checkpoints.save(here, optimizer, clock, model, number + 1)
        optimizer.close()
        return rates

    with psclient.LocalServer() as server:
        whole = run(server.server, tmp_path / "whole", False, (0, 1))
    with psclient.LocalServer() as server:
        parts = run(server.server, tmp_path / "parts", False, (0,)) + run(server.server, tmp_path / "parts", True, (1,))
    assert parts == pytest.approx(whole)


@pytest.mark.parametrize("arguments", [(), ("--no-density-warmup",)])
def test_the_warm_up_of_density_can_be_switched_off(tmp_path, arguments):
    options, model = parse("--method", "dgc", "--density", "0.02", *arguments), make_model()
    with psclient.LocalServer() as server:
        optimizer, clock = methods.make_optimizer(options, model, place(server.server, tmp_path), LENGTH)
        epoch(model, optimizer, clock, DataLoader(TensorDataset(*make_data(count=16)), 16))
        assert optimizer.param_groups[0]["density"] == (0.02 if arguments else 0.25)
        optimizer.close()


def test_the_warm_up_of_the_rate_can_be_switched_off():
    length = methods.Length.of(parse("--warmup-epochs", "0"), 8)
    for kind in ("cosine", "step"):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.05)
        methods.build(length.schedule(kind, 1), optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.05

"""Several optimizers in one process: one over the same parameters follows another, and two models never become one."""

import gc
import sys

import pytest
import torch
from torch import nn

import psclient
from psclient.errors import ConfigurationError, SettingsMismatchError, SparsepsError
from psclient.rpc.local_server import LocalServer
from tests.system.failures.test_interruptions import status
from tests.system.tools import QUICK, make_data, make_model, train_step
from tests.tiers import long_but

HASTY = QUICK.model_copy(update={"patience_seconds": 20.0})
"""Whoever waits for a ghost gives up within a test's time."""


def critic(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(20, 1)


def asgd(model, server, **options):
    return psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server, settings=QUICK, **options)


def values(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def are(model, before):
    return all(torch.equal(parameter, value) for parameter, value in zip(model.parameters(), before, strict=True))


# Two models


@pytest.mark.parametrize("variable", [None, "RANK", "PSCLIENT_WORKER"])
def test_two_equal_models_are_refused_and_the_first_trains_on(monkeypatch, variable):
    if variable is not None:
        monkeypatch.setenv(variable, "0")
    with LocalServer() as server:
        one, two = critic(1), critic(2)
        before = values(two)
        first = asgd(one, server)
        with pytest.raises(ConfigurationError, match=r"ModuleDict.*its own server.*worker="):
            asgd(two, server)
        assert are(two, before), "nothing was written to it"
        one(torch.ones(2, 20)).sum().backward()
        first.step()
        assert first.version == 1
        assert [worker.worker_id for worker in status(server).workers] == [first.worker]
        first.close()
        asgd(two, server).close()


def test_a_server_of_another_name_is_the_same_one():
    with LocalServer() as server:
        one, two = critic(1), critic(2)
        with asgd(one, server), pytest.raises(ConfigurationError, match=r"ModuleDict"):
            asgd(two, server.server.replace("127.0.0.1", "localhost"))


@pytest.mark.parametrize("variable", ["RANK", "PSCLIENT_WORKER"])
def test_a_discriminator_that_does_not_fit_leaves_the_generators_optimizer_alone(monkeypatch, variable):
    monkeypatch.setenv(variable, "0")
    with LocalServer() as server:
        generator, discriminator = nn.Linear(4, 20), critic()
        first = asgd(generator, server)
        with pytest.raises(SparsepsError, match="ModuleDict"):
            asgd(discriminator, server)
        generator(torch.ones(2, 4)).sum().backward()
        first.step()
        assert first.version == 1
        first.close()


def test_workers_that_are_named_train_one_model_on_purpose():
    with LocalServer() as server:
        one, two = critic(1), critic(2)
        with asgd(one, server, worker="a"), asgd(two, server, worker="b"):
            assert are(two, values(one))
            assert sorted(worker.worker_id for worker in status(server).workers) == ["a", "b"]


def test_two_models_with_a_server_each_are_two():
    with LocalServer() as server, LocalServer() as other:
        one, two = critic(1), critic(2)
        before = values(two)
        with asgd(one, server), asgd(two, other):
            assert are(two, before)


# The same again


@pytest.mark.parametrize("variable", [None, "PSCLIENT_WORKER"])
def test_a_cell_that_makes_a_new_model_and_optimizer_may_be_run_again(monkeypatch, variable):
    if variable is not None:
        monkeypatch.setenv(variable, "me")
    with LocalServer(lease_seconds=600) as server:
        for _ in range(3):
            model = make_model()
            optimizer = asgd(model, server)
            train_step(model, optimizer, *make_data())
        assert optimizer.version == 3
        assert [worker.worker_id for worker in status(server).workers] == [optimizer.worker]
        optimizer.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kept", long_but(["traceback"], ["list", "traceback"]))
@pytest.mark.parametrize("method", ["rounds", "bound", "overlap", "outer"])
def test_an_earlier_optimizer_of_the_same_parameters_is_no_ghost(method, kept, monkeypatch):
    """One that a list, or the traceback of an interrupted cell, still refers to."""
    bound = {"ssp_bound": 2} if method == "bound" else {}
    with LocalServer(lease_seconds=600, **bound) as server:
        model, ghosts = make_model(batch_norm=False), []

        def make():
            options = {"model": model, "server": server, "settings": HASTY}
            if method == "outer":
                inner = torch.optim.SGD(model.parameters(), lr=0.1)
                return psclient.Outer(inner, sync_every=1, rounds=psclient.Rounds(), **options)
            options["rounds"] = psclient.Rounds() if method in ("rounds", "overlap") else None
            return psclient.ASGD(model.parameters(), lr=0.1, overlap=method == "overlap", **options)

        def cell(stop=None):
            optimizer = make()
            if kept == "list":
                ghosts.append(optimizer)
            for step in range(6):
                train_step(model, optimizer, *make_data())
                if step == stop:
                    raise KeyboardInterrupt
            return optimizer

        try:
            cell(stop=2)
        except KeyboardInterrupt as interrupt:
            monkeypatch.setattr(sys, "last_exc", interrupt, raising=False)
        optimizer = cell()
        assert [worker.worker_id for worker in status(server).workers] == [optimizer.worker]
        optimizer.close()


@pytest.mark.parametrize("variable", [None, "PSCLIENT_WORKER"])
def test_an_optimizer_that_the_run_refuses_leaves_the_earlier_one_alone(monkeypatch, variable):
    if variable is not None:
        monkeypatch.setenv(variable, "me")
    with LocalServer(lease_seconds=600) as server:
        model = make_model(batch_norm=False)
        first = asgd(model, server)
        with pytest.raises(SettingsMismatchError, match="momentum"):
            asgd(model, server, momentum=0.9)
        train_step(model, first, *make_data())
        assert first.version == 1
        first.close()


def test_parameters_that_were_added_later_count():
    with LocalServer(lease_seconds=600) as server:
        model = nn.ModuleDict({"body": nn.Linear(20, 20), "head": nn.Linear(20, 2)})
        options = {"lr": 0.1, "model": model, "server": server, "settings": QUICK}
        first = psclient.ASGD(model["body"].parameters(), worker="first", **options)
        first.add_param_group({"params": model["head"].parameters()})
        with psclient.ASGD(model["head"].parameters(), worker="second", **options):
            assert [worker.worker_id for worker in status(server).workers] == ["second"]


def test_a_part_of_the_parameters_is_enough():
    with LocalServer(lease_seconds=600) as server:
        model = nn.ModuleDict({"body": nn.Linear(20, 20), "head": nn.Linear(20, 2)})
        first = asgd(model, server)
        options = {"lr": 0.1, "model": model, "server": server, "settings": QUICK}
        with psclient.ASGD(model["head"].parameters(), **options) as second:
            assert [worker.worker_id for worker in status(server).workers] == [second.worker]
        with pytest.raises(ConfigurationError, match="has left its run"):
            first.step()


def test_an_optimizer_that_waits_for_the_collector_forbids_no_other():
    """As in a cell that has ended with an error, whose traceback has the model."""
    with LocalServer() as server:
        circle = [nn.Linear(4, 2)]
        circle += [circle, psclient.DGS(circle[0].parameters(), lr=0.1, model=circle[0], server=server)]
        gc.disable()
        try:
            del circle
            model = nn.Linear(4, 2)
            psclient.DGS(model.parameters(), lr=0.1, model=model, server=server).close()
        finally:
            gc.enable()

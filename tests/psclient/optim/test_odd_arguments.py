"""Arguments that nobody can mean are errors of this library that say what is wanted, before anything is sent.

What any Python function does with an argument that it does not have, and torch with parameters that are none, stays
theirs.
"""

import logging

import numpy as np
import pytest
import torch
from torch import nn

import psclient
from psclient.errors import ConfigurationError, from_refusal
from psclient.rpc.local_server import LocalServer
from pscore.wire.errors import ErrorCode, Rejected
from tests.system.tools import QUICK, make_data, make_model, train_step

NOWHERE = "127.0.0.1:9"


def make(method=psclient.DGS, **options):
    model = torch.nn.Linear(4, 2)
    defaults = {"model": model, "server": NOWHERE, "settings": QUICK}
    if method is not psclient.ServerOptimizer:
        defaults["lr"] = 0.1
    return method(model.parameters(), **(defaults | options))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"model": iter(torch.nn.Linear(4, 2).parameters())}, "model= must be a torch.nn.Module"),
        ({"model": [torch.ones(2)]}, "model= must be a torch.nn.Module"),
        ({"model": "resnet18"}, "model= must be a torch.nn.Module"),
        ({"server": 50051}, "server= must be"),
        ({"method": psclient.ServerOptimizer, "optimizer": "SGD", "scheduler_every": True}, "scheduler_every= must be"),
        ({"server": ["127.0.0.1", 50051]}, "server= must be"),
        ({"server": ("127.0.0.1:1", None)}, "server= must be"),
        ({"settings": {"server": NOWHERE}}, r"settings= must be psclient.ClientSettings\(...\)"),
        ({"settings": psclient.ClientSettings}, r"settings= must be psclient.ClientSettings\(...\)"),
        ({"worker": 3}, "worker= must be a name"),
        ({"method": psclient.ServerOptimizer, "optimizer": "LBFGS"}, "LBFGS recomputes the loss"),
        ({"lr": "0.1"}, "lr must be a number, not '0.1'"),
        (
            {"method": psclient.ServerOptimizer, "optimizer": "AdamW", "lr": 0.1},
            "lr of the server's optimizer stands in options=",
        ),
        ({"lr": float("inf")}, "lr must be"),
        ({"weight_decay": float("inf")}, "weight_decay must be"),
        ({"overlap": "yes"}, "overlap= must be True or False"),
        ({"budget": 0}, "share of a budget must be an int or a float above 0"),
        ({"budget": float("nan")}, "share of a budget must be an int or a float above 0"),
        ({"budget": 3}, r"Budget\(bytes_per_second=…\)"),
        ({"budget": True}, "budget= must be a share"),
        ({"budget": 0.03, "density": 0.01}, "density= and budget= exclude each other"),
        ({"budget": 0.03, "method": psclient.ASGD}, "every entry takes in 4 bits"),
        ({"rounds": 3}, "rounds must be psclient.Rounds"),
        ({"method": psclient.ServerOptimizer, "optimizer": 5}, "optimizer must be a class of torch.optim"),
        ({"method": psclient.ServerOptimizer, "optimizer": psclient.MomentumSGD}, "optimizer must be a class of torch"),
        (
            {"method": psclient.ServerOptimizer, "optimizer": "SGD", "scheduler": (torch.optim.SGD, {})},
            "scheduler= must be a class of torch.optim.lr_scheduler",
        ),
        ({"method": psclient.ServerOptimizer, "optimizer": "SGD", "options": 0.1}, "options= must be"),
        ({"method": psclient.ServerOptimizer, "optimizer": "SGD", "options": ["lr"]}, "options= must be"),
        ({"method": psclient.ServerOptimizer, "optimizer": "SGD", "scheduler": 5}, "scheduler= must be"),
        ({"method": psclient.ServerOptimizer, "optimizer": "SGD", "scheduler": ("StepLR", 3)}, "scheduler= must be"),
        ({"method": psclient.ServerOptimizer, "optimizer": "SGD", "scheduler_every": "x"}, "scheduler_every= must be"),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else "",
)
def test_an_argument_of_another_kind_is_named_with_what_is_wanted(options, wanted):
    with pytest.raises(ConfigurationError, match=wanted):
        make(**options)


@pytest.mark.parametrize(
    "call",
    [
        lambda: psclient.Rounds(quorum="x"),
        lambda: psclient.Rounds(seconds=0),
        lambda: psclient.Rounds(quorum=0),
        lambda: psclient.download(50051),
        lambda: LocalServer(shards=0),
        lambda: LocalServer(shards="2"),
        lambda: LocalServer(shards=True),
        lambda: psclient.Rounds(quorum=True),
        lambda: psclient.Rounds(start_workers=np.bool_(True)),
        lambda: psclient.Rounds(seconds=True),
        lambda: psclient.Rounds(wait_factor=1),
        lambda: psclient.Rounds(wait_factor=float("inf")),
        lambda: psclient.schedules.dgc_warmup(True),
        lambda: psclient.Outer(torch.optim.SGD(make_model().parameters(), lr=0.1), sync_every=True),
        lambda: psclient.WAGMA(torch.optim.SGD(make_model().parameters(), lr=0.1), tau=True),
        lambda: psclient.Outer(torch.optim.SGD(make_model().parameters(), lr=0.1), sync_every=2, decay="x"),
        lambda: psclient.Outer(torch.optim.SGD(make_model().parameters(), lr=0.1), sync_every=2, decay=None),
    ],
)
def test_other_calls_too(call):
    with pytest.raises(ConfigurationError):
        call()


def test_numbers_of_numpy_and_torch_are_numbers():
    model = make_model(batch_norm=False)
    two = np.int64(2)
    assert psclient.Rounds(quorum=two, seconds=np.float32(0.5), start_workers=two).agreed() == (
        psclient.Rounds(quorum=2, seconds=0.5, start_workers=2).agreed()
    )
    with (
        LocalServer(shards=np.int64(1)) as server,
        psclient.ServerOptimizer(
            model.parameters(),
            "AdamW",
            {"lr": torch.tensor(0.5), "weight_decay": np.float32(0.25)},
            scheduler=("StepLR", {"step_size": two}),
            scheduler_every=("samples", np.int32(10)),
            model=model,
            server=server.server,
            settings=QUICK,
        ) as optimizer,
    ):
        sampler = psclient.ElasticSampler(np.int64(256), optimizer, seed=two, lease_samples=two)
        assert len({*zip(range(4), sampler, strict=False)}) == 4
        for samples in (True, np.bool_(True), 1.0, -1):
            with pytest.raises(ConfigurationError, match="samples must be a number of samples, from 0"):
                optimizer.step(samples=samples)
        nn.functional.cross_entropy(model(make_data()[0]), make_data()[1]).backward()
        optimizer.step(samples=np.int64(3))
        assert optimizer.totals.samples == 3


@pytest.mark.parametrize("method", [psclient.DGS, psclient.MomentumSGD])
def test_a_model_or_nothing_as_params_is_named_with_what_is_wanted(method):
    with pytest.raises(ConfigurationError, match=r"params holds a model: .*model\.parameters\(\)"):
        method([{"params": make_model()}], lr=0.1)
    with pytest.raises(ConfigurationError, match="none of its parameters needs a gradient"):
        method(make_model().requires_grad_(False), lr=0.1)
    for params in ([], iter(())):
        with pytest.raises(ConfigurationError, match=r"params is empty"):
            method(params, lr=0.1)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("model.pt", "safetensors"), ("no/folder/model.safetensors", "no folder .*folder"), (".", "is a folder")],
)
def test_a_model_is_saved_as_what_its_name_says_and_where_there_is_a_folder(tmp_path, name, wanted):
    with pytest.raises(ConfigurationError, match=wanted):  # before the server is asked, which is not there
        psclient.save("127.0.0.1:1", tmp_path / name, patience_seconds=0.1)
    assert not [*tmp_path.iterdir()]


def test_a_model_is_not_saved_under_the_name_of_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with LocalServer() as server:
        model = make_model()
        optimizer = psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server.server)
        with pytest.raises(ConfigurationError, match=r"'s3://bucket/model\.safetensors' is a URL"):
            psclient.save(server.server, "s3://bucket/model.safetensors")
        optimizer.close()
    assert not [*tmp_path.iterdir()]


@pytest.fixture(scope="module")
def server_optimizer():
    model = make_model(batch_norm=False)
    with LocalServer() as server:
        optimizer = psclient.ServerOptimizer(
            model.parameters(), "SGD", {"lr": 0.1}, model=model, server=server.server, settings=QUICK
        )
        yield model, optimizer
        optimizer.close()


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
    ],
)
def test_a_scheduler_of_any_kind_finds_the_rate_on_the_worker(server_optimizer, scheduler):
    model, optimizer = server_optimizer
    optimizer.load_state_dict(optimizer.state_dict())
    rate = optimizer.param_groups[0]["lr"]
    made = scheduler(optimizer)
    train_step(model, optimizer, *make_data())
    assert made.get_last_lr() == [rate]


def test_what_is_no_state_is_not_loaded_and_what_is_no_closure_not_called(server_optimizer):
    _, optimizer = server_optimizer
    for state in ({}, {"param_groups": 3}, None):
        with pytest.raises(ConfigurationError, match="no state of an optimizer"):
            optimizer.load_state_dict(state)
    with pytest.raises(ConfigurationError, match="closure"):
        optimizer.step(5)


def test_without_a_model_is_warned_of_once_and_named_where_models_differ(caplog):
    parameters = [torch.nn.Parameter(torch.ones(3))]
    with LocalServer() as server:
        with caplog.at_level(logging.WARNING, "psclient"):
            optimizer = psclient.ASGD(parameters, lr=0.1, server=server.server, settings=QUICK)
            for _ in range(3):
                parameters[0].grad = torch.ones(3)
                optimizer.step()
        warned = [each.getMessage() for each in caplog.records if "model=" in each.getMessage()]
        assert len(warned) == 1
        assert "parameter_0" in warned[0]
        with pytest.raises(psclient.errors.FingerprintMismatchError, match="model="):
            make(psclient.ASGD, server=server.server)
        optimizer.close()


def test_models_that_differ_by_themselves_are_no_question_of_model():
    refusal = Rejected(ErrorCode.FINGERPRINT_MISMATCH, "parameter 'a' [1] stands where the run has 'b' [1]", tensor="a")
    assert "model=" not in str(from_refusal(refusal))


def test_a_clock_is_given_a_scheduler_and_an_optimizer_in_this_order():
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr=0.1), 1)
    with pytest.raises(ConfigurationError, match=r"VersionClock\(scheduler, optimizer\)"):
        psclient.VersionClock(scheduler.optimizer, scheduler)


def test_a_step_that_finds_no_gradient_asks_for_the_model(server_optimizer, caplog):
    _, optimizer = server_optimizer
    optimizer.zero_grad()
    for _ in range(2):
        optimizer.step()
    assert caplog.text.count("found no gradient") == 1


@pytest.mark.parametrize("rate", [-1.0, float("nan"), 1e9])
def test_a_rate_that_is_set_by_hand_is_named_where_it_is_none(server_optimizer, rate):
    model, optimizer = server_optimizer
    optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(ConfigurationError, match=r"lr (of param group 0 is|must be)"):
        train_step(model, optimizer, *make_data())


def test_before_the_first_push_no_round_trip_is_told():
    with make(server="local") as optimizer:
        assert psclient.scalars(optimizer)["psclient/round_trip_seconds"] == 0


def test_residuals_of_another_worker_are_dropped_aloud(caplog):
    with LocalServer() as server:
        states = []
        for name in ("a", "b", "a"):
            model = make_model()
            options = {"density": 0.01, "model": model, "server": server, "worker": name, "settings": QUICK}
            with psclient.DGS(model.parameters(), lr=0.1, **options) as optimizer:
                if states:
                    optimizer.load_state_dict(states[0])
                    assert any(optimizer.state.values()) is (name == "a")
                else:
                    train_step(model, optimizer, *make_data())
                    states.append(optimizer.state_dict())
        assert caplog.text.count("this state is of worker a, and this is worker b") == 1

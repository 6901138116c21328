"""The API follows the manners of Python, of torch.optim and of torchft, so that nobody has to look them up."""

import copy
import logging
import os
import re
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

import psclient
from psclient import errors
from psclient.errors import ConfigurationError
from tests.system.tools import QUICK, make_data, make_model, train_step

NOWHERE = "127.0.0.1:9"


@pytest.fixture(scope="module")
def server():
    with psclient.LocalServer() as one:
        yield one


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ConfigurationError, ValueError),
        (errors.UnknownArgumentError, TypeError),
        (errors.CopyRefusedError, TypeError),
        (errors.ModelChangedError, RuntimeError),
        (errors.ServerUnreachableError, ConnectionError),
        (errors.HandshakeError, ConnectionError),
        (errors.WrongShardError, errors.ServerUnreachableError),
        (errors.HeldBackError, TimeoutError),
        (errors.EpochHeldUpError, TimeoutError),
        (errors.EngineError, RuntimeError),
        (errors.ServerNotReadyError, RuntimeError),
        (errors.ServerFaultError, RuntimeError),
        (errors.FingerprintMismatchError, ValueError),
        (errors.SettingsMismatchError, ValueError),
        (errors.WorkerAliveError, RuntimeError),
        (errors.LeaseLostError, ConnectionError),
        (errors.RunFinishedError, RuntimeError),
        (errors.RefusedError, RuntimeError),
        (errors.NonFiniteGradientError, FloatingPointError),
        (errors.UpdateOverflowError, OverflowError),
        (errors.AccessError, PermissionError),
        (errors.EvictedError, PermissionError),
        (errors.NodeBrokenError, ConnectionError),
        (errors.RankLostError, ConnectionError),
    ],
)
def test_an_error_is_also_the_built_in_one_that_a_caller_would_catch(kind, builtin):
    assert issubclass(kind, builtin)
    assert issubclass(kind, errors.SparsepsError)


def test_who_is_held_back_has_a_server_that_answers():
    assert not issubclass(errors.HeldBackError, errors.ServerUnreachableError | ConnectionError)
    assert issubclass(errors.HeldBackError, errors.PatienceError)
    assert issubclass(errors.ServerUnreachableError, errors.PatienceError)


def test_every_error_is_a_built_in_one():
    of_psclient = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    own = {kind for kind in of_psclient if kind.__module__ == errors.__name__}
    for kind in own - {errors.SparsepsError, errors.Transient}:
        assert any(base.__module__ == "builtins" for base in kind.__mro__[1:-3]), kind


def test_a_copy_is_refused_as_copy_refuses_what_it_cannot_copy(server):
    model = make_model()
    with psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server, settings=QUICK) as optimizer:
        with pytest.raises(TypeError):
            copy.copy(optimizer)
        model[0].weight.grad = torch.full_like(model[0].weight, torch.nan)
        with pytest.raises(ArithmeticError):
            optimizer.step()


@pytest.mark.parametrize(
    ("method", "unknown", "said"),
    [
        (
            psclient.DGS,
            "connect_seconds",
            r"'connect_seconds', which is a setting: pass settings=psclient.ClientSettings\(connect_seconds=...\), or "
            "set PSCLIENT_CONNECT_SECONDS",
        ),
        (psclient.DGS, "momentun", r"DGS\(\) got an unexpected keyword argument 'momentun'; did you mean 'momentum'\?"),
        (psclient.DGC, "learning_rate", r"'learning_rate'; did you mean 'lr'\?"),
        (psclient.DGS, "on_laod", r"DGS\(\) .* 'on_laod'; did you mean 'on_load'\?"),
        (psclient.ASGD, "density", r"'density'; it takes params, lr.*, and what every method takes$"),
        (psclient.SSGD, "defaults", r"'defaults'; it takes params, lr.*, and what every method takes$"),
        (psclient.DGC, "colour", r"'colour'; it takes params, lr.*, and what every method takes$"),
    ],
)
def test_an_unknown_argument_is_named_by_the_class_that_was_called(method, unknown, said):
    with pytest.raises(TypeError, match=said) as caught:
        method(nn.Linear(4, 2).parameters(), lr=0.1, server=NOWHERE, **{unknown: 0.1})
    assert isinstance(caught.value, ConfigurationError)


def test_asgd_says_which_algorithm_of_this_name_is_meant():
    assert "torch.optim.ASGD" in psclient.ASGD.__doc__


def names_without_a_model(params, caplog):
    with psclient.LocalServer() as server, caplog.at_level(logging.WARNING, "psclient"):
        with psclient.DGS(params, lr=0.1, density=0.5, server=server, settings=QUICK):
            assert "buffers stay local" in caplog.text
            assert "parameter_0" not in caplog.text
        return set(psclient.download(server.server))


def test_named_parameters_keep_their_names(caplog):
    model = make_model(batch_norm=False)
    assert names_without_a_model(model.named_parameters(), caplog) == {name for name, _ in model.named_parameters()}


def test_names_in_groups_are_kept(caplog):
    model = make_model(batch_norm=False)
    pairs = list(model.named_parameters())
    groups = [{"params": pairs[::2]}, {"params": pairs[1::2], "lr": 0.01}]
    assert names_without_a_model(groups, caplog) == {name for name, _ in pairs}


def test_names_of_the_inner_optimizer_are_kept(caplog):
    model = make_model(batch_norm=False)
    inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
    with psclient.LocalServer() as server:
        with psclient.Outer(inner, None, sync_every=2, server=server, settings=QUICK):
            pass
        assert set(psclient.download(server.server)) == {name for name, _ in model.named_parameters()}


def test_a_compiled_models_names_are_those_of_the_plain_one(caplog):
    model = torch.compile(nn.Linear(4, 2))
    assert names_without_a_model(model.named_parameters(), caplog) == {"weight", "bias"}


@pytest.mark.parametrize(
    "schedule", [lambda step: 0.25, psclient.schedules.lags(0.01, 0.5, 0.25)], ids=["plain", "lags"]
)
def test_a_density_schedule_leaves_groups_alone_that_have_a_density(schedule):
    model = nn.Sequential(nn.Linear(20, 40), nn.Linear(40, 10))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "density": 1.0}]
    options = {"model": model, "server": "local", "settings": QUICK, "overlap": True}
    with psclient.GradientDropping(groups, lr=0.1, density=schedule, **options) as optimizer:
        for _ in range(3):
            nn.functional.mse_loss(model(torch.randn(8, 20)), torch.randn(8, 10)).backward()
            optimizer.step()
        assert [group["density"] for group in optimizer.param_groups] == [0.25, 1.0]
        own = model[1].weight
        assert "residual" not in optimizer.state[own] or not optimizer.state[own]["residual"].any()
        optimizer.load_state_dict(optimizer.state_dict())
        assert [group["density"] for group in optimizer.param_groups] == [0.25, 1.0]


def outer(model, outer_optimizer, **options):
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"sync_every": 1, "model": model, "server": "local", "settings": QUICK} | options
    return psclient.Outer(inner, outer_optimizer, **options)


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        (None, partial(torch.optim.SGD, lr=1.0)),
        ("Adamax", torch.optim.Adamax),
        (
            ("SGD", {"lr": 0.5, "momentum": 0.9, "nesterov": True}),
            partial(torch.optim.SGD, lr=0.5, momentum=0.9, nesterov=True),
        ),
        (("AdamW", {"lr": 0.01}), partial(torch.optim.AdamW, lr=0.01)),
        (torch.optim.Adamax, torch.optim.Adamax),
        ((torch.optim.SGD, {"lr": 0.5}), partial(torch.optim.SGD, lr=0.5)),
    ],
)
def test_the_outer_optimizer_is_any_of_torchs_by_class_or_name_or_none_for_plain_averaging(description, expected):
    here, there = make_model(batch_norm=False), make_model(batch_norm=False)
    outside = [nn.Parameter(parameter.detach().clone()) for parameter in here.parameters()]
    step_out, local = expected(outside), torch.optim.SGD(here.parameters(), lr=0.1)
    with outer(there, description) as optimizer:
        for step in range(3):
            train_step(here, local, *make_data(seed=step, count=32))
            train_step(there, optimizer, *make_data(seed=step, count=32))
            with torch.no_grad():
                for parameter, start in zip(here.parameters(), outside, strict=True):
                    start.grad = start.detach() - parameter
                step_out.step()
                for parameter, start in zip(here.parameters(), outside, strict=True):
                    parameter.copy_(start)
        for mine, its in zip(there.parameters(), here.parameters(), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("wrong", [50, ("SGD", 0.7), psclient.MomentumSGD, nn.Linear, ("SGD", {}, 3), (0.7,), ()])
def test_an_outer_optimizer_of_another_kind_is_named_with_what_is_wanted(wrong):
    with pytest.raises(ConfigurationError, match="outer_optimizer= must be"):
        outer(nn.Linear(2, 2), wrong, server=NOWHERE)


def agreed(optimizer):
    return optimizer._agreed_settings()


def test_classes_of_torch_name_the_servers_optimizer_and_scheduler_as_their_names_do():
    given = []
    for kind, schedule, part in (
        ("AdamW", "SequentialLR", "StepLR"),
        (torch.optim.AdamW, torch.optim.lr_scheduler.SequentialLR, torch.optim.lr_scheduler.StepLR),
    ):
        model = make_model(batch_norm=False)
        parts = [(part, {"step_size": 2}), (part, {"step_size": 3})]
        scheduler = (schedule, {"milestones": [2]}, parts)
        options = {"scheduler": scheduler, "model": model, "server": "local", "settings": QUICK}
        with psclient.ServerOptimizer(model, kind, {"lr": 0.1}, **options) as optimizer:
            given.append(agreed(optimizer))
    assert given[0] == given[1]


WRONG = """
import torch
import psclient

model = torch.nn.Linear(4, 2)
with psclient.DGS(model, lr=0.1, server="host:50051", overlap=True, rounds=psclient.Rounds()) as optimizer:
    optimizer.accumulating()
psclient.DGS(model, lr=0.1, sever="host:50051")
psclient.DGS(model, lr=0.1, server=50051)
psclient.ASGD(model, lr=0.1, density=0.1)
psclient.SSGD(model, lr=0.1, on_load="replce")
psclient.ServerOptimizer(model, torch.optim.AdamW, {"lr": 0.1}, momentum=0.9)
psclient.Outer(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=2, overlap=True)
psclient.WAGMA(torch.optim.SGD(model.parameters(), lr=0.1), rounds=psclient.Rounds())
"""


LOOKED_INTO = """
[mypy]
follow_imports = skip
ignore_missing_imports = True
[mypy-psclient.*,pscore.*,torch.nn.*,torch.optim.*]
follow_imports = silent
[mypy-torch,torch._C,torch._tensor]
follow_imports = silent
"""
"""What a script and psclient name of their types; all of PyTorch would take half a minute of a core."""


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.executes_python
def test_a_type_checker_finds_an_argument_that_a_method_does_not_have(tmp_path):
    script, settings = tmp_path / "train.py", tmp_path / "mypy.ini"
    script.write_text(WRONG)
    settings.write_text(LOOKED_INTO)
    environment = {**os.environ, "MYPYPATH": os.getcwd()}
    command = [sys.executable, "-m", "mypy", f"--config-file={settings}", f"--cache-dir={tmp_path}", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    errors = re.findall(r"train.py:(\d+): error: (.*)", done.stdout)
    first = WRONG.splitlines().index('psclient.DGS(model, lr=0.1, sever="host:50051")') + 1
    assert [int(line) for line, _ in errors] == [*range(first, first + 7)], done.stdout
    for (_, text), name in zip(
        errors, ["sever", "server", "density", "on_load", "momentum", "overlap", "rounds"], strict=True
    ):
        assert f'"{name}"' in text

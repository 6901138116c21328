"""Readers that hold an fp32 run in 16 bits: exactly the rounded model, for fewer bytes."""

import threading
from itertools import product

import pytest
import torch

import psclient
from psclient import DirectorySink, Follower, LocalServer, errors
from psclient.reader import follower as follower_module
from pscore.reader.transfer import CutTransfer
from tests.system.following.following_tools import (
    READING,
    SECONDS,
    SleepyEngine,
    loaded,
    parameters_of,
    same,
    training,
)
from tests.system.tools import make_model, wait_until
from tests.tiers import long_but

NARROW = [torch.bfloat16, torch.float16]
CONVERSIONS = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float16),
]


def rounded(tensors, dtype):
    return {name: value.to(dtype) for name, value in tensors.items()}


@pytest.mark.parametrize(
    ("shards", "dtype"),
    long_but([(2, torch.float16)], product((1, 2), NARROW)),
)
def test_modules_directories_and_engines_have_the_rounded_model(tmp_path, dtype, shards):
    module, exact, engine, wrong = make_model(1).to(dtype), make_model(2), SleepyEngine(), []
    with LocalServer(shards=shards, cut_seconds=0.01) as server, training(server, lr=1e-3) as run:
        run.steps()

        def check(cut):
            is_one = len({shard.version for shard in cut.shards}) == 1
            if is_one and not same(parameters_of(module), rounded(run.versions[cut.version], dtype)):
                wrong.append(cut)

        with (
            psclient.follow(server, module, settings=READING, on_cut=check) as follower,
            psclient.follow(server, exact, settings=READING) as other,
            Follower(server, DirectorySink(tmp_path, dtype), READING) as directory,
            Follower(server, engine, READING, dtype=dtype) as taker,
        ):
            for _ in range(10):
                version = run.steps(3)
                follower.wait_for(version - 3, SECONDS)
            for each in (follower, other, directory, taker):
                each.wait_for(version, SECONDS)
                wait_until(lambda each=each: each.lag.versions == 0)
            assert wrong == []
            expected = rounded(run.versions[version], dtype)
            wait_until(lambda: same(parameters_of(module), expected))  # a cut may be before the other shard's push
            wait_until(lambda: same(parameters_of(exact), run.versions[version]))
            wait_until(lambda: follower.digest == directory.digest == taker.digest)
            assert follower.digest != other.digest
            assert follower.cut.weight_version == other.cut.weight_version
            assert same({name: engine.tensors[name] for name in expected}, expected)
            _, found = loaded(tmp_path)
            assert same({name: found[name] for name in expected}, expected)
            state, mine = psclient.download(server), dict(module.named_buffers())
            assert mine.keys() <= state.keys()
            assert all(torch.equal(found[name], state[name]) for name in mine)
            assert all(torch.equal(value, state[name].to(value.dtype)) for name, value in mine.items())


def test_small_steps_come_as_residues_and_in_few_bytes(monkeypatch):
    taken, real = [], CutTransfer._own
    monkeypatch.setattr(CutTransfer, "_own", lambda *args: taken.append(1) or real(*args))
    torch.manual_seed(0)
    modules = [torch.nn.Linear(512, 512).bfloat16(), torch.nn.Linear(512, 512)]
    with LocalServer(cut_seconds=0.01) as server:
        model = torch.nn.Linear(512, 512)
        optimizer = psclient.ASGD(model.parameters(), lr=1e-6, model=model, server=server)
        with optimizer:
            followers = [psclient.follow(server, module, settings=READING) for module in modules]
            for follower in followers:
                follower.wait_for(0, SECONDS)
            before = [follower.fetched_bytes for follower in followers]
            for _ in range(3):
                for parameter in model.parameters():
                    parameter.grad = torch.randn_like(parameter)
                optimizer.step()
                for follower in followers:
                    follower.wait_for(optimizer.version, SECONDS)
            for module in modules:
                expected = rounded(parameters_of(model), module.weight.dtype)
                assert same(parameters_of(module), expected)
            narrow, wide = (after.fetched_bytes - had for after, had in zip(followers, before, strict=True))
            for follower in followers:
                follower.close()
    assert taken
    assert narrow < wide / 20


def test_a_module_may_change_its_type_while_it_follows(caplog):
    module = make_model(1)
    with LocalServer(cut_seconds=0.01) as server, training(server) as run:
        run.steps()
        with psclient.follow(server, module, settings=READING) as follower:
            follower.wait_for(1, SECONDS)
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                with follower.hold():
                    module.to(dtype)
                version = run.steps(2)
                expected = rounded(run.versions[version], dtype)
                wait_until(lambda: follower.ready and follower.version == version, SECONDS)  # noqa: B023
                wait_until(lambda: same(parameters_of(module), expected), SECONDS)  # noqa: B023


@pytest.mark.parametrize(("before", "after"), CONVERSIONS)
def test_a_conversion_inside_hold_is_never_seen_half_done(monkeypatch, before, after):
    monkeypatch.setattr(follower_module, "_CONVERSION_SECONDS", 0.0)
    module = make_model(1).to(before)
    with LocalServer(cut_seconds=0.01) as server, training(server) as run:
        run.steps()
        with psclient.follow(server, module, settings=READING) as follower:
            follower.wait_for(1, SECONDS)
            with follower.hold():
                module[0].to(after)
                version = run.steps()
                wait_until(lambda: follower._holds._waiting_alone == 1 or follower.is_over, SECONDS)
                module.to(after)
            follower.wait_for(version, SECONDS)
            assert same(parameters_of(module), rounded(run.versions[version], after))


@pytest.mark.parametrize(("before", "after"), CONVERSIONS)
def test_a_conversion_outside_hold_may_take_a_while(monkeypatch, before, after):
    monkeypatch.setattr(follower_module, "_CONVERSION_SECONDS", SECONDS)
    module = make_model(1).to(before)
    with LocalServer(cut_seconds=0.01) as server, training(server) as run:
        run.steps()
        with psclient.follow(server, module, settings=READING) as follower:
            follower.wait_for(1, SECONDS)
            module[0].to(after)
            version = run.steps()
            wait_until(lambda: not follower._following._readers or follower.is_over, SECONDS)
            module.to(after)
            wait_until(lambda: follower.ready and follower.version == version, SECONDS)
            assert same(parameters_of(module), rounded(run.versions[version], after))


@pytest.mark.parametrize(("before", "after"), CONVERSIONS)
def test_what_was_fetched_is_not_written_over_a_module_that_was_converted_meanwhile(monkeypatch, before, after):
    fetched, goes_on, right = threading.Event(), threading.Event(), []
    module, real = make_model(1).to(before), follower_module._Following._fetch

    def fetch(self, cut, *rest):
        found = real(self, cut, *rest)
        if cut.version == 2 and not fetched.is_set():
            fetched.set()
            assert goes_on.wait(SECONDS)
        return found

    monkeypatch.setattr(follower_module._Following, "_fetch", fetch)
    with LocalServer(cut_seconds=0.01) as server, training(server, lr=1e-3) as run:
        run.steps()

        def check(cut):
            right.append(same(parameters_of(module), rounded(run.versions[cut.version], module[0].weight.dtype)))

        with psclient.follow(server, module, settings=READING, on_cut=check) as follower:
            follower.wait_for(1, SECONDS)
            run.steps()
            assert fetched.wait(SECONDS)
            with follower.hold():
                module.to(after)
            goes_on.set()
            wait_until(lambda: len(right) == 2, SECONDS)
            assert all(right)
            assert follower.version == 2


def test_what_others_have_written_is_found_although_residues_are_completed_from_it():
    module = make_model(1).bfloat16()
    with LocalServer(cut_seconds=0.01) as server, training(server, lr=1e-3) as run:
        run.steps()
        with psclient.follow(server, module, settings=READING) as follower:
            follower.wait_for(1, SECONDS)
            for _ in range(3):
                with follower.hold():
                    module[0].weight.data.add_(1.0)  # leaves no trace
                version = run.steps(1)
                wait_until(lambda: follower.ready and follower.version == version, SECONDS)  # noqa: B023
                expected = rounded(run.versions[version], torch.bfloat16)
                wait_until(lambda: same(parameters_of(module), expected), SECONDS)  # noqa: B023


def test_a_run_that_is_in_16_bits_itself_is_followed_as_it_is():
    module, model = make_model(1, batch_norm=False).bfloat16(), make_model(0, batch_norm=False).bfloat16()
    with LocalServer(cut_seconds=0.01) as server:
        optimizer = psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server)
        with optimizer, psclient.follow(server, module, settings=READING) as follower:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            follower.wait_for(1, SECONDS)
            assert same(parameters_of(module), parameters_of(model))


MIXED = {
    "some layers": lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).half()),
    "two types": lambda: torch.nn.Sequential(torch.nn.Linear(4, 4).bfloat16(), torch.nn.Linear(4, 4).half()),
}


@pytest.mark.parametrize("name", MIXED)
def test_a_module_of_several_types_is_refused_with_what_to_do(name):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with (
        LocalServer() as server,
        psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server),
        psclient.follow(server, MIXED[name](), settings=READING) as follower,
    ):
        with pytest.raises(errors.FollowerNotReadyError, match="all that is float32 in the run in float16"):
            follower.wait_for(0, SECONDS)
        assert follower.is_over


def test_a_directory_keeps_its_type(tmp_path):
    with LocalServer() as server, training(server) as run:
        run.steps()
        with Follower(server, DirectorySink(tmp_path, torch.bfloat16), READING) as follower:
            follower.wait_for(1, SECONDS)
        with Follower(server, DirectorySink(tmp_path, torch.bfloat16), READING) as follower:
            follower.wait_for(1, SECONDS)
            assert follower.fetched_bytes == 0
        other = Follower(server, DirectorySink(tmp_path), READING)
        with other, pytest.raises(errors.FollowerNotReadyError, match="in another data type"):
            other.wait_for(1, SECONDS)


def test_values_beyond_float16_are_refused_to_its_readers_alone():
    model = torch.nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(1e6)
    half, full = torch.nn.Linear(4, 4).half(), torch.nn.Linear(4, 4)
    with (
        LocalServer() as server,
        psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server),
        psclient.follow(server, full, settings=READING) as other,
        psclient.follow(server, half, settings=READING) as follower,
    ):
        other.wait_for(0, SECONDS)
        wait_until(lambda: follower.error is not None, SECONDS)
        assert "float16" in str(follower.error)
        assert not follower.ready
        assert same(parameters_of(full), parameters_of(model))


def test_buffers_beyond_float16_are_refused_too_and_the_version_before_stays():
    module, held = make_model(1).half(), {}

    def state():
        return {name: value.clone() for name, value in module.state_dict().items()}

    with LocalServer(cut_seconds=0.01, buffer_period_steps=1) as server, training(server) as run:
        run.steps()
        with psclient.follow(
            server, module, settings=READING, on_cut=lambda cut: held.update({cut: state()})
        ) as follower:
            follower.wait_for(1, SECONDS)
            run.model[1].running_var.fill_(3e5)
            version = run.steps(2)
            wait_until(lambda: follower.error is not None, SECONDS)
            assert isinstance(follower.error, errors.RefusedError)
            assert "1.running_var has values beyond float16: follow in bfloat16" in str(follower.error)
            with follower.hold() as cut:
                assert same(state(), held[cut])
                assert module[1].running_var.isfinite().all()
                module.bfloat16()
            wait_until(lambda: follower.ready and follower.version == version and follower.error is None, SECONDS)
            wait_until(lambda: float(module[1].running_var.min()) > 1e5, SECONDS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, "bfloat16"])
def test_other_types_are_refused_at_once(tmp_path, dtype):
    with pytest.raises(errors.ConfigurationError, match=r"torch\.bfloat16"):
        DirectorySink(tmp_path, dtype)
    with pytest.raises(errors.ConfigurationError, match=r"torch\.bfloat16"):
        Follower("localhost:1", SleepyEngine(), dtype=dtype)


def test_the_type_of_a_directory_is_named_with_it(tmp_path):
    with pytest.raises(errors.ConfigurationError, match="DirectorySink"):
        Follower("localhost:1", DirectorySink(tmp_path), dtype=torch.float16)

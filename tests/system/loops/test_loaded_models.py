"""A model that a script loads after it has made its optimizer: the run begins with it, or somebody is asked."""

import logging

import pytest
import torch

import psclient
from psclient.errors import ConfigurationError, ModelChangedError, ModelLoadedError
from psclient.rpc.local_server import LocalServer
from psclient.rpc.shard_stream import ShardStream
from tests.system.tools import make_data, make_model, optimizer_of, train_step
from tests.tiers import long_but

ON_LOAD = [None, "server", "replace"]


def checkpoint(value=5.0):
    return {name: torch.full_like(tensor, value) for name, tensor in make_model(batch_norm=False).state_dict().items()}


def write_data(model, state):
    for name, parameter in model.named_parameters():
        parameter.data.copy_(state[name])


def give_memory(model, state):
    for name, parameter in model.named_parameters():
        parameter.data = state[name].clone()


WAYS = {
    "load_state_dict": lambda model, state: model.load_state_dict(state),
    "data": write_data,
    "memory": give_memory,
}


def of(method, **given):
    return lambda model, server, **options: optimizer_of(method, model, 1e-3, server=server, **given, **options)


dgs, asgd, overlap, wagma = of("dgs", density=0.1), of("asgd"), of("overlap"), of("wagma")
outer, server_optimizer = of("outer", outer_optimizer=None), of("sgd")
CASES = [*((method, 1) for method in (dgs, asgd, overlap, outer, server_optimizer, wagma)), (dgs, 2), (outer, 2)]
"""Methods, and numbers of shards."""


def steps(model, optimizer, count=2):
    for _ in range(count):
        train_step(model, optimizer, *make_data())


def mean(state):
    """The mean over the parameters, of a model or of the server's."""
    values = state.values() if isinstance(state, dict) else state.parameters()
    return torch.cat([value.detach().reshape(-1) for value in values]).mean().item()


def assert_is_at(model, server, value):
    """Both the worker and the server are near a checkpoint, and equal."""
    assert mean(psclient.download(server.server)) == pytest.approx(value, abs=0.1)
    assert mean(model) == pytest.approx(value, abs=0.1)


@pytest.fixture
def shards():
    return 1


@pytest.fixture
def server(shards):
    with LocalServer(shards=shards, down_mode="exact") as started:
        yield started


@pytest.mark.parametrize(
    ("method", "shards", "way"),
    long_but(
        [(outer, 1, "load_state_dict"), (asgd, 2, "data"), (dgs, 2, "memory")],
        [*((*case, "load_state_dict") for case in CASES), (dgs, 1, "data"), (asgd, 2, "data"), (dgs, 2, "memory")],
    ),
)
def test_a_run_begins_with_what_was_loaded_before_its_first_push(method, way, server, caplog):
    model = make_model(batch_norm=False)
    with method(model, server) as optimizer:
        WAYS[way](model, checkpoint())
        steps(model, optimizer, 4)
        optimizer.pull()
        assert_is_at(model, server, 5.0)
        for name, tensor in psclient.download(server.server).items():
            torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=1e-6)
    assert "written to" not in caplog.text


@pytest.mark.parametrize(("method", "shards"), CASES[-4:])
def test_a_pull_before_the_first_step_keeps_what_was_loaded(method, server):
    model = make_model(batch_norm=False)
    with method(model, server) as optimizer:
        model.load_state_dict(checkpoint())
        optimizer.pull()
        assert_is_at(model, server, 5.0)
        steps(model, optimizer)
        assert_is_at(model, server, 5.0)


@pytest.mark.parametrize(("method", "shards"), long_but([(overlap, 1), (dgs, 2)], CASES))
def test_workers_that_load_the_same_go_on_together(method, server):
    first, second = make_model(batch_norm=False), make_model(seed=7, batch_norm=False)
    with method(first, server, worker="a") as one, method(second, server, worker="b") as two:
        first.load_state_dict(checkpoint())
        second.load_state_dict(checkpoint())
        for _ in range(3):
            steps(first, one)
            version = one.version
        steps(second, two)
        assert two.version > version > 0
        two.pull()
        assert_is_at(second, server, 5.0)
    with method(third := make_model(seed=8, batch_norm=False), server, worker="c") as late:
        third.load_state_dict(checkpoint())
        steps(third, late)
        late.pull()
        assert_is_at(third, server, 5.0)


def test_one_worker_loads_and_the_others_follow(server):
    first, second = make_model(batch_norm=False), make_model(seed=7, batch_norm=False)
    with dgs(first, server, worker="a") as one, dgs(second, server, worker="b") as two:
        second.load_state_dict(checkpoint())
        steps(second, two)
        steps(first, one)
        one.pull()
        assert_is_at(first, server, 5.0)


@pytest.mark.parametrize(
    ("method", "shards", "when"),
    [
        (wagma, 1, "late"),
        (dgs, 2, "in the middle"),
        pytest.param(dgs, 1, "late", marks=pytest.mark.long),
        *(pytest.param(*case, 1, "in the middle", marks=pytest.mark.long) for case in ((overlap,), (outer,))),
    ],
)
@pytest.mark.parametrize("on_load", ON_LOAD)
def test_a_run_that_has_been_trained_asks_which_is_to_stay(when, on_load, method, server, caplog):
    first, second = make_model(batch_norm=False), make_model(seed=7, batch_norm=False)
    with method(first, server, worker="a") as one:
        steps(first, one)
        one.pull()
        before = mean(first)
        with method(second, server, worker="b", on_load=on_load) as two:
            if when == "in the middle":
                steps(second, two)
            second.load_state_dict(checkpoint())
            if on_load is None:
                for _ in range(2):
                    with pytest.raises(ModelLoadedError, match=r"(?s)0\.weight.*on_load=.*replace"):
                        steps(second, two)
                    assert mean(second) == pytest.approx(5.0)
                two.pull()
            steps(second, two)
            two.pull()
            expected = 5.0 if on_load == "replace" else before
            assert_is_at(second, server, expected)
            steps(first, one)
            one.pull()
            assert_is_at(first, server, expected)
    assert ("goes on from its own" in caplog.text) == (on_load != "replace")


def test_what_is_written_back_before_the_first_step_is_no_load(server, caplog):
    model = make_model(batch_norm=False)
    with dgs(model, server) as optimizer:
        uploaded = optimizer.totals.upload_bytes
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(checkpoint())
        model.load_state_dict(saved)
        steps(model, optimizer)
        assert optimizer.totals.upload_bytes == uploaded


def test_buffers_are_loaded_too(server):
    model, loaded = make_model(), make_model(seed=3)
    steps(loaded, torch.optim.SGD(loaded.parameters(), lr=0.1), 5)
    with asgd(model, server) as optimizer:
        model.load_state_dict(loaded.state_dict())
        optimizer.pull()
        assert torch.equal(psclient.download(server.server)["1.running_mean"], loaded[1].running_mean)


def test_a_restart_of_a_worker_with_a_checkpoint_goes_on_at_the_server(server, caplog, monkeypatch):
    monkeypatch.setenv("PSCLIENT_ON_LOAD", "server")
    caplog.set_level(logging.WARNING)
    model = make_model(batch_norm=False)
    with dgs(model, server, worker="w") as optimizer:
        model.load_state_dict(checkpoint(3.0))
        steps(model, optimizer)
    again = make_model(seed=4, batch_norm=False)
    given = {"density": 0.1, "model": again, "server": server, "worker": "w"}
    with psclient.DGS(again.parameters(), lr=1e-3, **given) as optimizer:
        again.load_state_dict(checkpoint(2.0))
        steps(again, optimizer)
        optimizer.pull()
        assert_is_at(again, server, 3.0)


@pytest.mark.parametrize("shards", [2])
def test_an_upload_that_breaks_between_two_shards_stops_nobody(server, monkeypatch):
    first, second = make_model(batch_norm=False), make_model(seed=7, batch_norm=False)
    with dgs(second, server, worker="b") as two:
        one = dgs(first, server, worker="a", on_load="replace")
        steps(second, two)
        two.pull()
        before = mean(second)
        first.load_state_dict(checkpoint())
        upload = ShardStream.upload
        with monkeypatch.context() as patch:
            patch.setattr(ShardStream, "upload", lambda shard, *arguments: broken(upload, shard, *arguments))
            with pytest.raises(KeyboardInterrupt):
                steps(first, one, 1)
        one.close()
        steps(second, two)
        two.pull()
        assert_is_at(second, server, before)


def broken(upload, shard, *arguments):
    """Send to all shards but the first, which is the last."""
    if shard.index == 0:
        raise KeyboardInterrupt
    return upload(shard, *arguments)


def test_a_replaced_model_counts_on(server):
    first, second = make_model(batch_norm=False), make_model(seed=7, batch_norm=False)
    with dgs(first, server, worker="a") as one, dgs(second, server, worker="b", on_load="replace") as two:
        steps(first, one, 5)
        second.load_state_dict(checkpoint())
        steps(second, two, 1)
        assert two.version == 6


@pytest.mark.parametrize("drop", ["on_load", "pull"])
def test_buffers_are_dropped_with_their_model(drop, server):
    first, second = make_model(), make_model()
    loaded = {name: torch.full_like(tensor, 7) for name, tensor in second.state_dict().items()}
    on_load = "server" if drop == "on_load" else None
    with dgs(first, server, worker="a") as one, dgs(second, server, worker="b", on_load=on_load) as two:
        steps(first, one)
        second.load_state_dict(loaded)
        if drop == "on_load":
            second.eval()  # which leaves the statistics alone
            steps(second, two, 1)
        else:
            two.pull()
        assert second[1].running_mean.abs().max() < 1


def test_what_is_frozen_is_not_loaded_later(server):
    model = make_model(batch_norm=False)
    model[0].requires_grad_(False)
    with dgs(model, server) as optimizer:
        same = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(checkpoint())
        with pytest.raises(ModelChangedError, match=r"0\.weight.*before the optimizer is made"):
            steps(model, optimizer, 1)
        model.load_state_dict(same)
        steps(model, optimizer, 1)


def test_a_choice_that_there_is_not_is_said(server):
    with pytest.raises(ConfigurationError, match="error, server, replace"):
        dgs(make_model(), server, on_load="keep")

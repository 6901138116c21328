"""Workers of vLLM install exactly the versions of a feed that they are told to have."""

import importlib.metadata

import pytest
import torch

import psclient
from psclient.errors import ConfigurationError, FollowerNotReadyError
from psclient.integrations.vllm import register
from tests.psclient.integrations import vllm_interface
from tests.psclient.integrations.vllm_interface import PackedModel, WeightTransferEngineFactory, checkpoint, make_engine
from tests.system.publishing.publishing_tools import QUIET
from tests.system.tools import wait_until

SECONDS = 60.0


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    vllm_interface.install(monkeypatch)
    register()


class Feed:
    """A policy that is published, a few weights changed at a time."""

    def __init__(self, server):
        self.server, self.tensors, self.changes = server, checkpoint(), 0
        self.publisher = psclient.Publisher(server, settings=QUIET)

    def publish(self, name="k_proj.weight", change=lambda flat: flat.mul_(2)):
        change(self.tensors[name].view(-1)[self.changes : self.changes + 3])
        self.changes += 3
        return self.publisher.publish(self.tensors).weight_version


@pytest.fixture
def feed():
    with psclient.LocalServer(cut_seconds=0.01) as server:
        found = Feed(server)
        yield found
        found.publisher.close()


@pytest.fixture
def engines():
    found = []

    def make(feed, model, **options):
        engine = make_engine(model)
        found.append(engine)
        options = {"server": feed.server.addresses, "seconds": SECONDS, **options}
        engine.init_transfer_engine(engine.parse_init_info(options))
        return engine

    yield make
    for engine in found:
        engine.shutdown()


def update(engine, version):
    """Do what vLLM does for one update."""
    engine.start_weight_update()
    try:
        engine.update_weights({"weight_version": version})
    finally:
        engine.finish_weight_update()


def staged(engine):
    """Return the version that the follower has fetched ahead of time."""
    cut = engine._handover._staged
    return cut.weight_version if cut is not None else ""


def test_the_package_has_the_entry_point_and_it_may_be_called_again():
    found = {each.name: each for each in importlib.metadata.entry_points(group="vllm.general_plugins")}
    if "sparseps" in found:  # an environment that was made before there was one has none
        assert found["sparseps"].load() is register
    register()
    register()
    assert set(WeightTransferEngineFactory._registry) == {"sparseps"}


def test_a_version_is_installed_when_it_is_named_and_not_before(feed, engines):
    model = PackedModel()
    first = feed.publish()
    engine = engines(feed, model)
    update(engine, first)
    assert model.holds(feed.tensors)
    assert model.reloads == 1
    before = {name: tensor.clone() for name, tensor in feed.tensors.items()}
    second = feed.publish()
    wait_until(lambda: staged(engine) == second, SECONDS)  # it is here, and nothing is written
    assert model.holds(before)
    update(engine, second)
    assert model.holds(feed.tensors)
    assert model.reloads == 1, "a change is written over what is there"
    loads = model.loads
    update(engine, second)
    assert model.loads == loads, "a version that is there is not loaded again"


def test_versions_in_between_are_skipped(feed, engines):
    model = PackedModel()
    engine = engines(feed, model)
    update(engine, feed.publish())
    loads = model.loads
    second = feed.publish("v_proj.weight")
    wait_until(lambda: staged(engine) == second, SECONDS)
    feed.publish("out_proj.weight")
    update(engine, feed.publish())
    assert model.holds(feed.tensors)
    assert model.loads == loads + 1


def test_all_of_one_tensor_is_a_change_too(feed, engines):
    model = PackedModel()
    engine = engines(feed, model)
    update(engine, feed.publish())
    feed.tensors["q_proj.weight"].add_(1)
    update(engine, feed.publish())
    assert model.holds(feed.tensors)
    assert model.reloads == 1


def test_every_rank_gets_its_part(feed, engines):
    models = [PackedModel(rank, 2) for rank in range(2)]
    ranks = [engines(feed, model) for model in models]
    for _ in range(3):
        version = feed.publish("out_proj.weight")
        for engine in ranks:
            update(engine, version)
        assert all(model.holds(feed.tensors) for model in models)


def test_a_version_that_is_over_is_refused_and_nothing_is_written(feed, engines):
    model = PackedModel()
    first = feed.publish()
    engine = engines(feed, model)
    update(engine, first)
    before = {name: tensor.clone() for name, tensor in feed.tensors.items()}
    second = feed.publish()
    third = feed.publish()
    wait_until(lambda: staged(engine) == third or staged(engine) == second, SECONDS)
    if staged(engine) == second:  # it was announced by itself
        update(engine, second)
        before = {name: tensor.clone() for name, tensor in feed.tensors.items()}
        before["k_proj.weight"].view(-1)[6:9].div_(2)
    else:
        with pytest.raises(FollowerNotReadyError, match="is over: the engine can have") as caught:
            update(engine, second)
        assert third in str(caught.value)
    assert model.holds(before)
    update(engine, third)
    assert model.holds(feed.tensors)
    with pytest.raises(FollowerNotReadyError, match="is over"):
        update(engine, first)
    assert model.holds(feed.tensors)


def test_a_version_that_does_not_come_leaves_the_engine_as_it_is(feed, engines):
    model = PackedModel()
    version = feed.publish()
    engine = engines(feed, model, seconds=1.0)
    update(engine, version)
    history, _, number = version.rpartition("/")
    with pytest.raises(FollowerNotReadyError, match="is not here"):
        update(engine, f"{history}/{int(number) + 1}")
    assert model.holds(feed.tensors)
    update(engine, feed.publish())
    assert model.holds(feed.tensors)


@pytest.mark.parametrize("with_directory", [True, False])
def test_after_a_failure_half_way_all_is_loaded_anew(feed, engines, tmp_path, with_directory):
    model = PackedModel()
    engine = engines(feed, model, **({"directory": str(tmp_path / "copy")} if with_directory else {}))
    update(engine, feed.publish())
    version = feed.publish()
    model.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        update(engine, version)
    assert not model.reloading
    with pytest.raises(RuntimeError, match="out of memory"):
        update(engine, version)
    model.fails = False
    update(engine, version)
    assert model.holds(feed.tensors)
    assert not model.reloading
    assert model.reloads == 3, "the first one, one that failed, and the last one"
    assert (tmp_path / "copy" / "rank-0-0" / "model.safetensors.index.json").exists() == with_directory


def test_a_change_that_vllm_cannot_take_is_refused_by_name_and_leaves_the_version_before(feed, engines):
    model = PackedModel()
    engine = engines(feed, model)
    update(engine, feed.publish())
    before = {name: tensor.clone() for name, tensor in feed.tensors.items()}
    diverged = feed.publish("v_proj.weight", lambda flat: flat.fill_(float("nan")))
    with pytest.raises(FollowerNotReadyError, match=r"'v_proj.weight' has a NaN"):
        update(engine, diverged)
    assert model.holds(before)
    feed.tensors["v_proj.weight"].view(-1)[3:6] = 1.0
    update(engine, feed.publish())
    assert model.holds(feed.tensors)


class CountingModel(PackedModel):
    """One that passes over the checkpoint's number of steps."""

    def load_weights(self, weights):
        return super().load_weights([each for each in weights if each[0] != "steps"])


def test_a_model_of_other_tensors_is_loaded_whole(feed, engines):
    model = CountingModel()
    feed.tensors["steps"] = torch.tensor([1], dtype=torch.int16, device="cpu")
    engine = engines(feed, model)
    update(engine, feed.publish())
    before = {name: tensor.clone() for name, tensor in feed.tensors.items()}
    feed.tensors["steps"] += 1
    with pytest.raises(FollowerNotReadyError, match=r"'steps' \(torch.int16\) has changed"):
        update(engine, feed.publish())
    assert model.holds(before)
    del feed.tensors["steps"]  # as the error says
    feed.server.processes[0].kill()
    feed.server.restart()  # it has lost everything
    feed.publisher.close()
    feed.publisher = psclient.Publisher(feed.server, settings=QUIET)
    update(engine, feed.publish())
    assert model.holds(feed.tensors)
    assert model.reloads == 2


def test_a_follower_that_has_ended_is_named_and_another_init_begins_anew(feed, engines):
    model = PackedModel()
    engine = engines(feed, model)
    update(engine, feed.publish())
    engine._follower.close()
    with pytest.raises(ConfigurationError, match="init_weight_transfer_engine again"):
        engine.start_weight_update()
    engine.init_transfer_engine(engine.parse_init_info({"server": feed.server.addresses, "seconds": SECONDS}))
    update(engine, feed.publish())
    assert model.holds(feed.tensors)


def test_a_version_that_was_passed_over_is_installed_if_it_is_named_after_all(feed, engines):
    model = PackedModel()
    engine = engines(feed, model, seconds=1.0)
    update(engine, feed.publish())
    version = feed.publish()
    wait_until(lambda: staged(engine) == version, SECONDS)
    history, _, number = version.rpartition("/")
    with pytest.raises(FollowerNotReadyError, match="is not here"):
        update(engine, f"{history}/{int(number) + 1}")
    engine._init_info.seconds = SECONDS
    update(engine, version)
    assert model.holds(feed.tensors)


def test_another_history_of_the_feed_is_followed_if_it_is_named(feed, engines):
    model = PackedModel()
    engine = engines(feed, model)
    update(engine, feed.publish())
    update(engine, feed.publish())
    feed.server.processes[0].kill()
    feed.server.restart()  # it has lost everything, and the publisher begins another run there
    version = feed.publish("q_proj.weight")
    update(engine, version)
    assert model.holds(feed.tensors)
    assert engine._handover.held.weight_version == version


def test_a_second_init_with_the_same_information_keeps_what_is_there(feed, engines):
    model = PackedModel()
    engine = engines(feed, model)
    update(engine, feed.publish())
    engine.init_transfer_engine(engine.parse_init_info({"server": feed.server.addresses, "seconds": SECONDS}))
    update(engine, feed.publish())
    assert model.reloads == 1
    assert model.holds(feed.tensors)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"server": "127.0.0.1:1", "settings": {"token": "secret"}}, "token_file"),
        ({"server": "127.0.0.1:1", "dtype": "float8"}, "bfloat16, float16 or empty"),
        ({"server": "127.0.0.1:1", "settings": {"tokenfile": "x"}}, "tokenfile"),
        ({"server": ""}, "no server is named"),
        ({}, "server"),
        ({"server": "127.0.0.1:1", "cache": "x"}, "cache"),
    ],
)
def test_what_an_engine_is_told_is_checked(options, says):
    engine = make_engine(PackedModel())
    with pytest.raises(ValueError, match=says):
        engine.init_transfer_engine(engine.parse_init_info(options))
    with pytest.raises(ConfigurationError, match="init_weight_transfer_engine first"):
        engine.start_weight_update()


def test_a_closed_engine_ends_its_follower_while_a_version_waits(feed, engines):
    engine = engines(feed, PackedModel())
    version = feed.publish()
    wait_until(lambda: staged(engine) == version, SECONDS)
    follower = engine._follower
    engine.shutdown()
    assert follower.is_over
    assert torch.count_nonzero(engine.model.qkv) == 0

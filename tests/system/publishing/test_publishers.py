"""What a publisher hands over is what every follower has, bit by bit, and a small change costs few bytes."""

from pathlib import Path

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import psclient
from psclient import DirectorySink, Follower, LocalServer, Publisher
from psclient.errors import ConfigurationError, SparsepsError
from tests.system.following.following_tools import SleepyEngine, loaded
from tests.system.publishing.publishing_tools import (
    QUIET,
    SECONDS,
    change,
    copied,
    mixed_tensors,
    odd_tensors,
    same_bits,
)
from tests.system.tools import make_model, wait_until
from tests.tiers import long_but

SOURCES = {"16 bits": odd_tensors, "one to eight bytes": mixed_tensors}


def test_the_guides_loop_publishes(tmp_path):
    page = (Path(__file__).parents[3] / "docs/guide/publishing.md").read_text()
    loop = page.split("```python\n")[1].split("```")[0]
    model = make_model(0)

    def train(module, batch):
        with torch.no_grad():
            next(module.parameters()).view(-1)[batch] += 1

    with LocalServer() as server:
        assert '"host:50051"' in loop
        names = {"path": tmp_path / "baseline", "batches": range(3), "model": model, "train": train}
        exec(loop.replace('"host:50051"', repr(server.server)), names)
        assert names["published"][:2] == (2, 1)
        assert same_bits(psclient.download(server.addresses), dict(model.state_dict()))


def test_the_guides_rollout_samples_with_whole_versions():
    page = (Path(__file__).parents[3] / "docs/guide/publishing.md").read_text()
    loop = page.split("## Rollouts of reinforcement learning")[1].split("```python\n")[1].split("```")[0]
    model = make_model(0).bfloat16()
    published, seen = {}, []

    def publish():
        version = publisher.publish(model).version
        published[version] = copied(model.state_dict())

    class Trainer:
        def wants_more(self):
            return not seen or seen[-1] < 3

        def send(self, episodes, version):
            assert same_bits(episodes, published[version])
            seen.append(version)
            with torch.no_grad():
                next(model.parameters()).view(-1)[version] += 1
            publish()

    with LocalServer(cut_seconds=0.01) as server, Publisher(server, settings=QUIET) as publisher:
        publish()
        assert '"host:50051"' in loop
        names = {
            "make_policy": lambda: make_model(1),
            "sample": lambda policy: copied(policy.state_dict()),
            "trainer": Trainer(),
        }
        exec(loop.replace('"host:50051"', repr(server.server)), names)
    assert seen == sorted(seen)


@pytest.fixture(params=[1, 3], ids=["1 shard", "3 shards"])
def server(request):
    with LocalServer(shards=request.param, cut_seconds=0.01) as found:
        yield found


class Holder(torch.nn.Module):
    def __init__(self, tensors):
        super().__init__()
        for name, tensor in copied(tensors).items():
            self.register_buffer(name, torch.zeros_like(tensor))


@pytest.mark.parametrize("source", long_but(list(SOURCES)[:1], SOURCES))
def test_followers_have_the_same_bits_at_every_version(server, tmp_path, source):
    tensors = SOURCES[source]()
    module, engine = Holder(tensors), SleepyEngine()
    with Publisher(server, settings=QUIET) as publisher:
        first = publisher.publish(tensors)
        assert first.version == 0
        sinks = [DirectorySink(tmp_path / "plain"), psclient.PatchSink(engine, directory=tmp_path / "engine")]
        with (
            psclient.follow(server, module, settings=QUIET) as follower,
            Follower(server, sinks[0], QUIET) as directory,
            Follower(server, sinks[1], QUIET) as patched,
        ):
            for number in range(4):
                if number:
                    change(tensors, number)
                    found = publisher.publish(iter(tensors.items()) if number == 2 else tensors)
                    assert found.version == number
                    assert found.changed < first.changed / 2
                for each in (follower, directory, patched):
                    each.wait_for(number, SECONDS)
                with follower.hold():
                    assert same_bits(dict(module.named_buffers()), tensors)
                about, files = loaded(tmp_path / "plain")
                assert about["version"] == number
                assert same_bits({name: files[name] for name in tensors}, tensors)
                some = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
                assert same_bits({name: engine.tensors[name] for name in some}, some)
            assert follower.digest == directory.digest == patched.digest


def test_a_change_costs_what_has_changed(server):
    weights = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    module = torch.nn.ParameterDict({"weights": torch.zeros_like(weights)})
    with Publisher(server, settings=QUIET) as publisher:
        publisher.publish({"weights": weights})
        with psclient.follow(server, module, settings=QUIET) as follower:
            follower.wait_for(0, SECONDS)
            before = follower.fetched_bytes
            weights.view(torch.int16)[::100] += 1
            found = publisher.publish({"weights": weights})
            assert found.changed == 2000
            assert found.nbytes < 7 * 2000  # on a very fast line places are written in four bytes each
            follower.wait_for(1, SECONDS)
            assert follower.fetched_bytes - before < 5 * 2000
            assert torch.equal(module["weights"], weights)


@pytest.mark.parametrize("share", long_but([0.6], [0.4, 0.6, 1.0]))
def test_a_publication_in_which_nearly_everything_changes_is_one_of_all_words(server, share):
    weights = torch.randn(100_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    module = torch.nn.ParameterDict({"weights": torch.zeros_like(weights)})
    changed = int(share * weights.numel())
    with Publisher(server, settings=QUIET) as publisher, psclient.follow(server, module, settings=QUIET) as follower:
        publisher.publish({"weights": weights})
        for version in range(1, 4):
            part = weights[-changed:] if version % 2 else weights[:changed]
            part.view(torch.int16)[:] ^= 3
            found = publisher.publish(iter({"weights": weights}.items()))
            assert found[:2] == (version, changed if share < 0.5 else weights.numel())
            with follower.at_least(version, SECONDS):
                assert torch.equal(module["weights"], weights)


def test_modules_and_iterators_that_use_their_memory_again(server):
    model = make_model(0)
    buffer = torch.zeros(1 << 10)

    def tensors():
        for name, tensor in model.state_dict().items():
            part = buffer.view(tensor.dtype)[: tensor.numel()].view(tensor.shape)
            part.copy_(tensor)
            yield name, part

    with Publisher(server, settings=QUIET) as publisher:
        assert publisher.publish(tensors()).version == 0
        with torch.no_grad():
            next(model.parameters()).view(-1)[3] += 1
        assert publisher.publish(model)[:2] == (1, 1)
        assert publisher.publish(tensors())[:2] == (2, 0)
    assert same_bits(psclient.download(server.addresses), dict(model.state_dict()))


def test_the_feed_is_saved_as_any_model(server, tmp_path):
    tensors = {name: tensor for name, tensor in mixed_tensors().items() if tensor.dtype != torch.float64}
    with Publisher(server, settings=QUIET) as publisher:
        publisher.publish(tensors)
    path = psclient.save(server.addresses, tmp_path / "model.safetensors")
    from safetensors.torch import load_file

    found = load_file(path)
    assert same_bits({name: found[name] for name in tensors}, tensors)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda found: {**found, "more": torch.zeros(2)}, "nothing more"),
        (lambda found: {name: found[name] for name in list(found)[:-1]}, "lacks scalar"),
        (lambda found: {name: tensor.float() for name, tensor in found.items()}, "float32 stands where"),
        (lambda found: {"other" if name == "plain" else name: found[name] for name in found}, "other"),
        (lambda found: {**found, "plain": found["plain"].t()}, "20, 50"),
        (lambda found: {**found, "plain": found["plain"].to("meta")}, "meta"),
        (lambda found: {**found, "plain": found["plain"].float().to_sparse()}, "layout"),
        (lambda found: [("plain", 3)], "names and tensors"),
        (lambda found: {**found, "plain": TwoTensor(found["plain"], found["plain"])}, "consists of other tensors"),
    ],
)
def test_other_tensors_are_refused_and_the_feed_goes_on(other, says):
    tensors = odd_tensors()
    with LocalServer() as server, Publisher(server, settings=QUIET) as publisher:
        publisher.publish(tensors)
        with pytest.raises(ConfigurationError, match=says):
            publisher.publish(other(tensors))
        change(tensors, 1)
        assert publisher.publish(tensors).version == 1


def test_nothing_and_twice_the_same_name_cannot_be_published():
    with LocalServer() as server:
        for source, says in (({}, "nothing"), (iter([("a", torch.ones(2)), ("a", torch.ones(2))]), "twice")):
            with Publisher(server, settings=QUIET) as publisher, pytest.raises(ConfigurationError, match=says):
                publisher.publish(source)


def test_a_module_with_a_parameter_that_the_feed_lacks_is_told_so():
    model, larger = make_model(0), make_model(0)
    larger.extra = torch.nn.Parameter(torch.zeros(3))
    with LocalServer() as server, Publisher(server, settings=QUIET) as publisher:
        publisher.publish(model)
        with (
            psclient.follow(server, larger, settings=QUIET) as follower,
            pytest.raises(SparsepsError, match="the run has no parameter extra"),
        ):
            follower.wait_for(0, SECONDS)


def test_what_others_write_into_a_module_that_follows_a_feed_is_found(caplog):
    model, module = make_model(0), make_model(1)
    with LocalServer(cut_seconds=0.01) as server, Publisher(server, settings=QUIET) as publisher:
        publisher.publish(model)
        with psclient.follow(server, module, settings=QUIET) as follower:
            with follower.hold(SECONDS), torch.no_grad():
                next(module.parameters()).add_(1.0)
            publisher.publish(model)
            with follower.at_least(1, SECONDS):
                assert same_bits(dict(module.state_dict()), dict(model.state_dict()))
    assert "others have written" in caplog.text


def test_a_feed_has_one_publisher_and_no_workers():
    tensors = odd_tensors()
    with LocalServer(lease_seconds=2.0) as server, Publisher(server, settings=QUIET) as publisher:
        publisher.publish(tensors)
        with pytest.raises(SparsepsError, match="publisher"), Publisher(server, settings=QUIET) as other:
            other.publish(tensors)
        model = make_model(0)
        with pytest.raises(SparsepsError):
            psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server, settings=QUIET)
        assert publisher.publish(tensors).version == 1


def test_a_run_that_trains_takes_no_publisher():
    model = make_model(0)
    with (
        LocalServer() as server,
        psclient.ASGD(model.parameters(), lr=0.1, model=model, server=server, settings=QUIET),
        Publisher(server, settings=QUIET) as publisher,
        pytest.raises(SparsepsError, match="trains a model"),
    ):
        publisher.publish(model)


def test_an_engine_without_a_directory_is_told_what_to_do_with_wide_elements():
    with LocalServer() as server, Publisher(server, settings=QUIET) as publisher:
        publisher.publish(mixed_tensors())
        with Follower(server, SleepyEngine(), QUIET) as follower, pytest.raises(SparsepsError, match="directory="):
            follower.wait_for(0, SECONDS)


def test_a_publisher_is_for_the_feed_that_it_names():
    with LocalServer(run_id="policy") as server:
        with Publisher(server, "other", settings=QUIET) as publisher, pytest.raises(SparsepsError, match="policy"):
            publisher.publish(odd_tensors())
        with Publisher(server, "policy", settings=QUIET) as publisher:
            assert publisher.publish(odd_tensors()).version == 0
        with pytest.raises(ConfigurationError, match="closed"):
            publisher.publish(odd_tensors())


def test_the_first_version_of_a_follower_is_not_older_than_its_loops(monkeypatch):
    source, module, told = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2), []
    with LocalServer(cut_seconds=0.01) as server, psclient.Publisher(server, settings=QUIET) as publisher:
        publisher.publish(source)
        later = []

        def load(elements):  # takes so long that a version is published meanwhile
            if not later:
                with torch.no_grad():
                    source.weight.add_(1)
                later.append(publisher.publish(source).version)
                with psclient.follow(server, torch.nn.Linear(3, 2)) as other:  # which has it: it is a cut now
                    other.wait_for(later[0], SECONDS)
                return True
            return False

        monkeypatch.setattr("psclient.reader.follower.warm_up", load)
        with psclient.follow(server, module, on_cut=lambda cut: told.append(cut.version)) as follower:
            wait_until(lambda: told, SECONDS)
            assert follower.version == later[0]
    assert told[0] == later[0]
    assert torch.equal(module.weight, source.weight)

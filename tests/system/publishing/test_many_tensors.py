"""More tensors than a message could name: a mixture of experts with a tensor an expert."""

import pytest
import torch

import psclient
from psclient import DirectorySink, Follower, LocalServer, Publisher
from psclient.settings import ClientSettings
from tests.system.following.following_tools import SleepyEngine, loaded

PATIENT = ClientSettings(server="local", deadline_seconds=30, patience_seconds=120)
SECONDS = 120.0


def names(count):
    for number in range(count):
        layer, expert, part = number // 768, number // 3 % 256, ("gate", "up", "down")[number % 3]
        yield f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"


class Experts(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        for name in names(count):
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(torch.zeros(2), requires_grad=False))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "count", [2_000, pytest.param(66_000, marks=pytest.mark.long)], ids=["many", "more than 16 bits count"]
)
def test_a_model_of_so_many_tensors_is_published_followed_and_restored(count, tmp_path):
    words = torch.zeros(count, 2)
    tensors = dict(zip(names(count), words, strict=True))
    module, engine = Experts(count), SleepyEngine()
    with LocalServer(data_dir=tmp_path / "data", cut_seconds=0.01) as server:
        with Publisher(server, settings=PATIENT) as publisher:
            publisher.publish(tensors)
            rename = lambda name: name.replace(".", "_")  # noqa: E731
            with (
                psclient.follow(server, module, rename=rename, settings=PATIENT) as follower,
                Follower(server, DirectorySink(tmp_path / "out"), PATIENT) as directory,
                Follower(server, engine, PATIENT) as patched,
            ):
                for each in (follower, directory, patched):
                    each.wait_for(0, SECONDS)
                words[::7, 1] += 1
                words[-1, 0] = 5
                found = publisher.publish(tensors)
                assert found.changed == len(words[::7]) + 1
                assert found.nbytes < 8 * found.changed
                for each in (follower, directory, patched):
                    each.wait_for(1, SECONDS)
                assert follower.digest == directory.digest == patched.digest
            assert torch.equal(torch.stack(list(module.parameters())), words)
            _, files = loaded(tmp_path / "out")
            assert torch.equal(torch.stack([files[name] for name in tensors]), words)
        for process in server.processes:
            process.kill()
            process.wait()
    with LocalServer(data_dir=tmp_path / "data", cut_seconds=0.01) as server:
        held = psclient.download(server.addresses)
        assert torch.equal(torch.stack([held[name] for name in tensors]), words)

"""Whatever dies between the parts of a publication: readers have a whole version, and publishing goes on."""

import subprocess
import sys

import pytest
import torch

import psclient
from psclient import LocalServer, Publisher
from psclient.errors import ConfigurationError, ServerNotReadyError, ServerUnreachableError
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.ctl.client import call
from tests.system.following.following_tools import SECONDS
from tests.system.publishing.publishing_tools import QUIET, change, copied, odd_tensors, same_bits


class Holder(torch.nn.Module):
    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, torch.zeros_like(tensor))

    @property
    def tensors(self):
        return dict(self.named_buffers())


class BrokenError(Exception):
    """Stands for the end of a publisher's process."""


@pytest.fixture
def server(tmp_path):
    with LocalServer(shards=2, cut_seconds=0.01, lease_seconds=2.0, data_dir=tmp_path / "data") as found:
        yield found


def kill(server, *shards):
    for shard in shards:
        server.processes[shard].kill()
    for shard in shards:
        server.restart(shard)


def before_publishing(monkeypatch, act):
    """Do something once every shard has staged the next version, and before it is published."""
    real, done = Publisher._settle, []

    def settle(self, run):
        if self._prepared is not None and not done:
            done.append(True)
            act()
        return real(self, run)

    monkeypatch.setattr(Publisher, "_settle", settle)
    return done


def fail():
    raise BrokenError


@pytest.mark.long
def test_what_is_staged_and_never_published_is_nobodys(server, monkeypatch):
    tensors = odd_tensors()
    first, module = {name: tensor.clone() for name, tensor in tensors.items()}, Holder(tensors)
    with psclient.follow(server, module, settings=QUIET) as follower:
        with Publisher(server, settings=QUIET) as publisher:
            publisher.publish(tensors)
            follower.wait_for(0, SECONDS)
            change(tensors, 1)
            before_publishing(monkeypatch, fail)
            with pytest.raises(BrokenError):
                publisher.publish(tensors)
        kill(server, 0, 1)
        with psclient.follow(server, late := Holder(tensors), settings=QUIET) as other:
            other.wait_for(0, SECONDS)
            assert same_bits(late.tensors, first)
        with follower.hold(SECONDS):
            assert same_bits(module.tensors, first)
        change(tensors, 2)
        with Publisher(server, settings=QUIET) as publisher:
            assert publisher.publish(tensors).version == 1
        with follower.at_least(1, SECONDS):
            assert same_bits(module.tensors, tensors)


@pytest.mark.parametrize(
    "dies", [pytest.param((0,), marks=pytest.mark.long), pytest.param((1,), marks=pytest.mark.long), (0, 1)]
)
def test_shards_that_die_before_it_is_published_have_it_staged_when_they_are_back(server, monkeypatch, dies):
    tensors = odd_tensors()
    module = Holder(tensors)
    with Publisher(server, settings=QUIET) as publisher, psclient.follow(server, module, settings=QUIET) as follower:
        publisher.publish(tensors)
        done = before_publishing(monkeypatch, lambda: kill(server, *dies))
        for number in (1, 2):
            change(tensors, number)
            found = publisher.publish(tensors)
            assert found.version == number
            assert found.changed < 1000
            follower.wait_for(number, SECONDS)
            with follower.hold():
                assert same_bits(module.tensors, tensors)
        assert done


def test_an_answer_that_never_came_is_asked_for_again(server, monkeypatch):
    tensors = odd_tensors()
    module = Holder(tensors)
    with Publisher(server, settings=QUIET) as publisher, psclient.follow(server, module, settings=QUIET) as follower:
        publisher.publish(tensors)
        connection, lost = publisher._run.coordinator.connection, []
        real = connection.call

        def call(policy, attempt):
            answer = real(policy, attempt)
            if hasattr(answer, "version") and type(answer).__name__ == "PublishResponse" and not lost:
                lost.append(answer)
                raise ServerUnreachableError("here", 0.0, "the answer is lost", "")
            return answer

        monkeypatch.setattr(connection, "call", call)
        change(tensors, 1)
        with pytest.raises(ServerUnreachableError):
            publisher.publish(tensors)
        follower.wait_for(1, SECONDS)
        change(tensors, 2)
        found = publisher.publish(tensors)
        assert (found.version, lost[0].version) == (2, 1)
        assert found.changed < 1000
        follower.wait_for(2, SECONDS)
        with follower.hold():
            assert same_bits(module.tensors, tensors)


def test_servers_that_lost_everything_get_the_newest_version_again():
    tensors = odd_tensors()
    with LocalServer(shards=2, cut_seconds=0.01) as server, Publisher(server, settings=QUIET) as publisher:
        publisher.publish(tensors)
        change(tensors, 1)
        publisher.publish(tensors)
        kill(server, 0, 1)
        change(tensors, 2)
        found = publisher.publish(tensors)
        assert found.version >= 2
        assert same_bits(psclient.download(server.addresses), tensors)


def test_a_new_publisher_goes_on_from_the_baseline_file(server, tmp_path):
    tensors, path = odd_tensors(), tmp_path / "baseline"
    with Publisher(server, baseline=path, settings=QUIET) as publisher:
        publisher.publish(tensors)
    for number in (1, 2):
        change(tensors, number)
        with Publisher(server, baseline=path, settings=QUIET) as publisher:
            found = publisher.publish(tensors)
            assert (found.version, found.changed < 1000) == (number, True)
        assert same_bits(psclient.download(server.addresses), tensors)


def spoil(path):
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "harm",
    [
        spoil,
        lambda path: path.write_bytes(path.read_bytes()[:-3]),
        lambda path: path.write_bytes(b""),
        lambda path: path.with_name(path.name + ".json").write_text("{"),
        lambda path: path.with_name(path.name + ".json").unlink(),
        lambda path: path.unlink(),
    ],
    ids=["a bit", "cut", "empty", "no json", "no description", "gone"],
)
def test_a_damaged_baseline_is_not_believed(server, tmp_path, harm):
    tensors, path = odd_tensors(), tmp_path / "baseline"
    with Publisher(server, baseline=path, settings=QUIET) as publisher:
        publisher.publish(tensors)
    harm(path)
    change(tensors, 1)
    with Publisher(server, baseline=path, settings=QUIET) as publisher:
        assert publisher.publish(tensors).version == 1
        assert same_bits(psclient.download(server.addresses), tensors)
        change(tensors, 2)
        assert publisher.publish(tensors).changed < 1000


def test_a_second_publisher_leaves_the_baseline_of_the_first_alone(server, tmp_path):
    tensors, path = odd_tensors(), tmp_path / "baseline"
    with Publisher(server, baseline=path, settings=QUIET) as publisher:
        publisher.publish(tensors)
        before = path.read_bytes()
        path.with_name(path.name + ".json").unlink()  # as while the first one writes a version into the file
        with pytest.raises(ConfigurationError, match="another publisher has the baseline"):
            Publisher(server, baseline=path, settings=QUIET)
        assert path.read_bytes() == before
        change(tensors, 1)
        assert publisher.publish(tensors).changed < 1000
        assert same_bits(psclient.download(server.addresses), tensors)
    with Publisher(server, baseline=path, settings=QUIET) as publisher:
        change(tensors, 2)
        assert publisher.publish(tensors).changed < 1000


def test_a_download_is_one_version(server):
    tensors = odd_tensors()
    with Publisher(server, settings=QUIET) as publisher:
        publisher.publish(tensors)
        run = publisher._run
        run.shards, both = run.shards[:1], run.shards  # the other one lacks version 1
        change(tensors, 1)
        publisher.publish(tensors)
        with pytest.raises(ServerNotReadyError, match=r"\[1, 0\]"):
            psclient.download(server.addresses, patience_seconds=0.5)
        run.shards = both
        publisher._forget_base(run)
        change(tensors, 2)
        publisher.publish(tensors)
        assert same_bits(psclient.download(server.addresses), tensors)


def test_a_baseline_of_another_version_of_the_feed_is_not_taken_for_the_newest(server, tmp_path):
    tensors, path = odd_tensors(), tmp_path / "baseline"
    with Publisher(server, baseline=path, settings=QUIET) as publisher:
        publisher.publish(tensors)
    change(tensors, 1)
    with Publisher(server, settings=QUIET) as publisher:
        publisher.publish(tensors)
    with Publisher(server, baseline=path, settings=QUIET) as publisher:
        change(tensors, 2)
        assert publisher.publish(tensors).version == 2
    assert same_bits(psclient.download(server.addresses), tensors)


def operate(*words):
    command = [sys.executable, "-m", "psservice", *words]
    return subprocess.run(command, timeout=SECONDS, capture_output=True, text=True, check=False)


def test_shards_of_a_checkpoint_of_two_moments_go_back_to_one_publication(server):
    tensors, versions = odd_tensors(), []
    with Publisher(server, settings=QUIET) as publisher:
        for number in range(4):
            change(tensors, number)
            publisher.publish(tensors)
            versions.append(copied(tensors))
            if number in (1, 2):
                address = server.addresses[number - 1]
                call(address, "TakeSnapshot", pb.TakeSnapshotRequest(checkpoint="torn"), SECONDS)
        assert operate("restore", "--checkpoint", "torn", *server.addresses).returncode == 0
        assert same_bits(psclient.download(server.addresses), versions[1])


def test_a_version_that_a_shard_lacks_is_not_restored_from_an_older_history(server):
    tensors = odd_tensors()
    with Publisher(server, settings=QUIET) as publisher:
        for number in range(4):
            change(tensors, number)
            publisher.publish(tensors)
        assert operate("restore", "--version", "1", *server.addresses).returncode == 0
        change(tensors, 4)
        publisher.publish(tensors)
        run = publisher._run
        run.shards, both = run.shards[:1], run.shards  # the other one lacks version 3 in this history
        change(tensors, 5)
        assert publisher.publish(tensors).version == 3
        run.shards = both
        publisher._forget_base(run)
        change(tensors, 6)
        assert publisher.publish(tensors).version == 4
        assert same_bits(psclient.download(server.addresses), tensors)
        found = operate("restore", "--version", "3", *server.addresses)
        assert found.returncode != 0
        assert "no shard was taken back" in found.stderr
        assert same_bits(psclient.download(server.addresses), tensors)


@pytest.mark.long
def test_a_feed_that_goes_back_is_published_whole(server):
    tensors = odd_tensors()
    module, versions = Holder(tensors), []
    with Publisher(server, settings=QUIET) as publisher, psclient.follow(server, module, settings=QUIET) as follower:
        for number in range(3):
            change(tensors, number)
            publisher.publish(tensors)
            versions.append({name: tensor.clone() for name, tensor in tensors.items()})
        follower.wait_for(2, SECONDS)
        command = [sys.executable, "-m", "psservice", "restore", "--version", "1", *server.addresses]
        subprocess.run(command, check=True, timeout=SECONDS, capture_output=True)
        assert same_bits(psclient.download(server.addresses), versions[1])
        with follower.hold():
            assert same_bits(module.tensors, versions[2])
        change(tensors, 3)
        found = publisher.publish(tensors)
        assert found.version == 2
        assert same_bits(psclient.download(server.addresses), tensors)
        change(tensors, 4)
        assert publisher.publish(tensors).version == 3
        follower.wait_for(3, SECONDS)
        with follower.hold():
            assert same_bits(module.tensors, tensors)

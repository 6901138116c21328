"""A relay has the cuts of its source, under the same names, and readers may go from one to the other."""

import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import pytest
import torch

import psclient
from psclient import DirectorySink, Follower, LocalServer, Publisher
from psclient.errors import SparsepsError
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.ctl.client import call
from tests.system.following.following_tools import READING, SECONDS, loaded, parameters_of, same, training
from tests.system.line import Line
from tests.system.publishing.publishing_tools import QUIET, change, mixed_tensors, odd_tensors, same_bits
from tests.system.tools import make_model, wait_until
from tests.tiers import long_but

pytestmark = pytest.mark.timeout(120)


def relaying(source, **settings):
    return LocalServer(**({"cut_seconds": 0.02, "shards": len(source.addresses), "relay_of": source.server} | settings))


class Holder(torch.nn.Module):
    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, torch.zeros_like(tensor))


@pytest.fixture(params=[1, pytest.param(3, marks=pytest.mark.long)], ids=["1 shard", "3 shards"])
def source(request, tmp_path):
    with LocalServer(shards=request.param, cut_seconds=0.02, data_dir=tmp_path / "source") as found:
        yield found


@contextmanager
def followed(server, module):
    with psclient.follow(server, module, settings=READING) as follower:
        yield follower


def until_all_have(version, follower):
    """Wait for a cut in which every shard has a version: an asynchronous run may have others on the way."""
    follower.wait_for(version, SECONDS)
    wait_until(lambda: {shard.version for shard in follower.cut.shards} == {version}, SECONDS)


@pytest.mark.parametrize("tensors", long_but([mixed_tensors], [odd_tensors, mixed_tensors]))
def test_a_feed_is_relayed_bit_by_bit_and_a_reader_may_change_over(source, tmp_path, tensors):
    tensors = tensors()
    module = Holder(tensors)
    with Publisher(source, settings=QUIET) as publisher, relaying(source) as relay, relaying(relay) as leaf:
        publisher.publish(tensors)
        for number in range(4):
            if number:
                change(tensors, number)
                publisher.publish(tensors)
            with followed(source, module) as near:
                near.wait_for(number, SECONDS)
                expected = near.cut
            for server in (relay, leaf):
                with Follower(server, DirectorySink(tmp_path / "model"), READING) as follower:
                    follower.wait_for(number, SECONDS)
                    assert follower.cut == expected
                    assert follower.cut.weight_version == expected.weight_version
                    if server is leaf:
                        assert follower.fetched_bytes < 500, "it had this version from the relay"
                assert same_bits(psclient.download(server.addresses), tensors)
                _, files = loaded(tmp_path / "model")
                assert same_bits({name: files[name] for name in tensors}, tensors)


def test_a_run_is_relayed_with_its_buffers_and_its_end(source):
    with training(source) as run, relaying(source) as relay:
        run.steps(3)
        module, near = make_model(), make_model()
        with followed(relay, module) as follower, followed(source, near) as beside:
            for _ in range(3):
                version = run.steps(2)
                for each in (follower, beside):
                    until_all_have(version, each)
                with follower.hold():
                    assert same(parameters_of(module), run.versions[follower.version])
                assert follower.digest == beside.digest
            assert {name: bits.tolist() for name, bits in module.named_buffers()} == {
                name: bits.tolist() for name, bits in near.named_buffers()
            }
            call(source.addresses[0], "FinishRun", pb.FinishRunRequest(), 10.0)
            wait_until(lambda: follower.finished, SECONDS)


def test_a_relay_in_half_the_bytes_has_what_readers_in_that_type_have(source):
    with training(source) as run, relaying(source, relay_type="bfloat16") as relay:
        version = run.steps(5)
        module, near = make_model().bfloat16(), make_model().bfloat16()
        with followed(relay, module) as follower, followed(source, near) as beside:
            for _ in range(3):
                until_all_have(version, follower)
                until_all_have(version, beside)
                assert follower.cut == beside.cut
                assert same(parameters_of(module), parameters_of(near))
                version = run.steps(2)


def test_a_relay_serves_what_it_has_while_the_source_is_away(source, tmp_path):
    tensors = odd_tensors()
    with Publisher(source, settings=QUIET) as publisher:
        publisher.publish(tensors)
        with relaying(source, data_dir=tmp_path / "relay") as relay:
            for number in range(1, 4):
                change(tensors, number)
                publisher.publish(tensors)
                with followed(relay, Holder(tensors)) as follower:
                    follower.wait_for(number, SECONDS)
                    held = follower.cut
                if number == 2:
                    with Follower(relay, DirectorySink(tmp_path / "late"), READING) as late:
                        late.wait_for(2, SECONDS)
                        whole_bytes = late.fetched_bytes
            source.stop()
            module = Holder(tensors)
            with followed(relay, module) as follower:
                follower.wait_for(3, SECONDS)
                assert same_bits(dict(module.named_buffers()), tensors)
    with relaying(source, data_dir=tmp_path / "relay") as relay:
        module = Holder(tensors)
        with followed(relay, module) as follower:
            follower.wait_for(3, SECONDS)
            assert follower.cut == held
            assert same_bits(dict(module.named_buffers()), tensors)
        with Follower(relay, DirectorySink(tmp_path / "late"), READING) as late:
            late.wait_for(3, SECONDS)
            assert late.fetched_bytes < whole_bytes / 2, "what has changed since the version that it has"


def test_a_killed_relay_goes_on_with_differences(source, tmp_path):
    tensors = odd_tensors()
    with (
        Publisher(source, settings=QUIET) as publisher,
        relaying(source, data_dir=tmp_path / "relay", log_to=open(tmp_path / "log", "w"), log_level="info") as relay,
    ):
        publisher.publish(tensors)
        module = Holder(tensors)
        with followed(relay, module) as follower:
            for number in range(1, 7):
                change(tensors, number)
                if number % 2:
                    shard = number // 2 % len(relay.processes)
                    relay.processes[shard].kill()
                    publisher.publish(tensors)
                    relay.restart(shard)
                else:
                    publisher.publish(tensors)
                follower.wait_for(number, SECONDS)
                with follower.hold():
                    assert same_bits(dict(module.named_buffers()), tensors)
    installed = (tmp_path / "log").read_text().count("model installed")
    assert installed == len(relay.addresses), "all of the model came once"


def test_a_relay_that_dies_at_any_moment_serves_from_its_directory_and_a_copy_of_it(tmp_path):
    tensors = odd_tensors()
    with (
        LocalServer(shards=3, cut_seconds=0.02, data_dir=tmp_path / "source") as source,
        Publisher(source, settings=QUIET) as publisher,
        relaying(source, data_dir=tmp_path / "relay") as relay,
    ):
        publisher.publish(tensors)
        versions = {0: {name: tensor.clone() for name, tensor in tensors.items()}}
        with followed(relay, Holder(tensors)) as follower:
            follower.wait_for(0, SECONDS)
            for version in range(1, 12):
                change(tensors, version)
                versions[version] = {name: tensor.clone() for name, tensor in tensors.items()}
                publisher.publish(tensors)
                if version > 8:
                    relay.processes[version % 3].kill()  # the others stage and publish what they still can
            seen = follower.version
        source.stop()
        for process in relay.processes:
            process.kill()
            process.wait()
    shutil.copytree(tmp_path / "relay", tmp_path / "copy")
    for directory in ("relay", "copy"):
        module = Holder(tensors)
        with relaying(source, data_dir=tmp_path / directory) as again, followed(again, module) as follower:
            follower.wait_for(seen, SECONDS)
            with follower.hold():
                assert same_bits(dict(module.named_buffers()), versions[follower.version])


def test_a_source_that_goes_back_takes_its_relay_along(tmp_path):
    with LocalServer(cut_seconds=0.02, data_dir=tmp_path / "source", snapshot_seconds=1000) as source:
        tensors = odd_tensors()
        with Publisher(source, settings=QUIET) as publisher, relaying(source) as relay:
            publisher.publish(tensors)
            first = {name: tensor.clone() for name, tensor in tensors.items()}
            for number in range(1, 4):
                change(tensors, number)
                publisher.publish(tensors)
            module = Holder(tensors)
            with psclient.follow(relay, module, settings=READING, allow_older=True) as follower:
                follower.wait_for(3, SECONDS)
                command = [sys.executable, "-m", "psservice", "restore", "--version", "0", *source.addresses]
                subprocess.run(command, check=True, timeout=60, capture_output=True)
                wait_until(lambda: follower.version == 0, SECONDS)
                with follower.hold():
                    assert same_bits(dict(module.named_buffers()), first)


def test_one_copy_crosses_the_line_however_many_readers_there_are():
    weights = {"w": torch.randn(200_000, generator=torch.Generator().manual_seed(0)).bfloat16()}
    with (
        LocalServer(cut_seconds=0.02) as source,
        Line(source.addresses[0]) as line,
        LocalServer(cut_seconds=0.02, relay_of=line.address) as relay,
        Publisher(source, settings=QUIET) as publisher,
        ExitStack() as stack,
    ):
        publisher.publish(weights)
        followers = [stack.enter_context(followed(relay, Holder(weights))) for _ in range(6)]
        for version in range(3):
            if version:
                weights["w"].view(torch.int16)[version::100] += 1
                publisher.publish(weights)
            for follower in followers:
                follower.wait_for(version, SECONDS)
        fetched = {follower.fetched_bytes for follower in followers}
        assert min(fetched) > 400_000
        assert line.down < 1.1 * max(fetched), "less than two readers would have fetched"


def test_a_relay_takes_no_workers(source):
    model = make_model()
    with training(source), relaying(source) as relay, pytest.raises(SparsepsError, match="relays"):
        psclient.ASGD(model.parameters(), lr=0.1, model=model, server=relay.server, settings=READING)

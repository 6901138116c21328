"""A run is stopped and goes on with three shards instead of two, at the same ports: what its followers do."""

import re
import subprocess
import sys
from contextlib import ExitStack

import pytest

import psclient
from psclient import DirectorySink, Follower
from psclient.errors import RolledBackError, WrongShardError
from psclient.reader import follower as follower_module
from tests.system.following.following_tools import READING, SECONDS, loaded, parameters_of, same, training
from tests.system.scripts import marked
from tests.system.serving import ports_in_a_row, serving
from tests.system.tools import make_model, wait_until


class Followed:
    """A module that follows; at each version it must have the run's values of that, all of them."""

    def __init__(self, server, versions, **options):
        self.module, self.wrong, self._versions = make_model(1), [], versions
        self.follow(server, **options)

    def follow(self, server, **options):
        self.follower = psclient.follow(server, self.module, settings=READING, on_cut=self._check, **options)

    def _check(self, cut):
        is_one = len({shard.version for shard in cut.shards}) == 1
        if is_one and not self.has(cut.version):
            self.wrong.append(cut)

    def has(self, version):
        return same(parameters_of(self.module), self._versions[version])

    def wait_for(self, version):
        self.follower.wait_for(version, SECONDS)
        wait_until(lambda: self.has(version), SECONDS)  # a cut may be before another shard's push


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(follower_module, "_ATTEMPT_SECONDS", 2.0)


def tensors(path):
    """The parameters in a directory, with their version."""
    about, found = loaded(path)
    names = [name for name, _ in make_model().named_parameters()]
    return about["version"], {name: found[name] for name in names}


def test_followers_of_two_shards_meet_three(tmp_path, impatient):
    first = ports_in_a_row(3)
    one, two, three = (",".join(f"127.0.0.1:{first + i}" for i in range(count)) for count in (1, 2, 3))
    out, options = tmp_path / "model", {"listen": one, "cut_seconds": 0.01}
    with ExitStack() as followers:

        def close(followed):
            followers.callback(lambda: followed.follower.close())
            return followed

        with serving(tmp_path / "log", shards=2, data_dir=tmp_path / "two", **options), training(two) as run:
            version, versions = run.steps(5), run.versions
            same_name = close(Followed(one, versions, allow_older=True))
            old_names = close(Followed(two, versions, allow_older=True))
            no_older = close(Followed(one, versions))
            directory = followers.enter_context(Follower(two, DirectorySink(out), READING))
            for each in (same_name, old_names, no_older):
                each.wait_for(version)
            directory.wait_for(version, SECONDS)
            wait_until(lambda: same(tensors(out)[1], versions[version]), SECONDS)
        with (
            serving(tmp_path / "log", shards=3, data_dir=tmp_path / "three", init=tmp_path / "two", **options),
            training(three) as run,
        ):
            assert run.optimizer.version == version
            assert same(run.versions[version], versions[version])
            newest = run.steps(3)
            versions.update(run.versions)

            # One address leads to all three.
            same_name.wait_for(newest)
            assert len(same_name.follower.cut.shards) == 3

            # Two of three addresses: nothing is taken, and the error says what to do.
            for follower in (old_names.follower, directory):
                wait_until(lambda follower=follower: isinstance(follower.error, WrongShardError), SECONDS)
                refusal = r"for shard (\d) of 2; it is shard \1 of 3; name every shard's address once, in order"
                assert re.search(refusal, str(follower.error))
                assert follower.version == version
            assert old_names.has(version)
            assert same(tensors(out)[1], versions[version])

            # The run that goes on has another id: it is followed if that was allowed.
            wait_until(lambda: isinstance(no_older.follower.error, RolledBackError), SECONDS)
            assert "allow_older=True" in str(no_older.follower.error)
            assert no_older.has(version)

            # With all three addresses they go on.
            for followed in (old_names, no_older):
                followed.follower.close()
                followed.follow(three, allow_older=True)
                followed.wait_for(newest)
            directory.close()
            command = [sys.executable, "-m", "psclient", "follow", *three.split(","), "--out", str(out), "--once"]
            refused = subprocess.run(
                [*command, "--timeout", "5"], capture_output=True, text=True, timeout=SECONDS, env=marked()[0]
            )
            assert refused.returncode == 1
            assert "--allow-older" in refused.stderr
            assert tensors(out)[0] == version
            subprocess.run([*command, "--allow-older"], check=True, timeout=SECONDS, env=marked()[0])
            assert tensors(out)[0] == newest
            assert same(tensors(out)[1], versions[newest])
            for followed in (same_name, old_names, no_older):
                assert followed.wrong == []

"""A primary that a power cut has taken back is not followed by a standby that has more: that one is to serve."""

import os
import uuid
from dataclasses import replace

import pytest

from pscore.wire.errors import ErrorCode, Rejected
from psservice.standby.following import Following
from psservice.storage import files
from psservice.storage.environment import MACHINE
from psservice.storage.journal import segment_numbers, segment_path
from psservice.storage.journal_format import HEAD_BYTES
from tests.psservice.durability.test_recovery import Shard, after_a_crash, begin, theta
from tests.psservice.durability.test_standby_directory import opened, push, settings, take_all
from tests.psservice.service_makers import bits

PUSHES = 3


@pytest.fixture
def cut_power(tmp_path, monkeypatch):
    """The machine of a directory starts anew, and bytes at the end of the journal are gone."""
    boot = tmp_path / "boot-id"
    boot.write_text("before\n")
    monkeypatch.setattr(files, "_BOOT_ID", boot)

    def cut(directory, lost_bytes):
        boot.write_text(f"{uuid.uuid4()}\n")
        journal = directory / "shard-0-of-1" / "journal"
        path = segment_path(journal, segment_numbers(files.DISK, journal)[-1])
        os.truncate(path, path.stat().st_size - lost_bytes)

    return cut


class AskedShard:
    """A primary in this process: a standby's question is heard as its service hears it."""

    def __init__(self, shard):
        self.shard, self.questions = shard, 0

    def ask(self, held):
        self.questions += 1
        self.shard.durability.replication.hear("standby", held)
        raise AssertionError("not refused")

    def close(self):
        pass


def trained(tmp_path):
    """Train a primary whose standby has everything; return the standby's directory, the model's bits and an image.

    The image is the primary's directory before anything of the server's end was written.
    """
    with Shard(tmp_path / "primary", fsync="never") as primary:
        begin(primary)
        replica = opened(tmp_path, fsync="never")
        for step in range(1, PUSHES + 1):
            model = push(primary, step)
        take_all(replica, primary)
        return replica, model, after_a_crash(tmp_path / "primary")


@pytest.mark.parametrize("lost_bytes", [1, 100])
def test_a_standby_that_has_more_stops_following_and_serves_with_everything(lost_bytes, cut_power, tmp_path):
    replica, model, image = trained(tmp_path)
    cut_power(image, lost_bytes)
    with Shard(image, fsync="never") as primary:
        assert primary.model.version < PUSHES
        asked = AskedShard(primary)
        following = Following(settings(tmp_path, promote_after_seconds=0.001), MACHINE, replica, asked)
        following.is_acknowledged = True
        assert not following.follow_once()
        assert not following.follow_once()
        assert asked.questions == 1, "nothing of that primary may take the place of what is here"
        assert "came back without a part" in following.status().error
        following.require_promotable(force=False)
        while not following.is_due():  # by itself, as the operator has allowed
            pass
    replica.close()
    again = opened(tmp_path, fsync="never")
    assert again.is_ahead, "a standby that is started again remembers it"
    again.close()
    with Shard(tmp_path / "standby", fsync="never") as served:
        assert (served.model.version, bits(theta(served))) == (PUSHES, model)


def test_a_standby_that_has_no_more_follows_the_new_history(cut_power, tmp_path):
    replica, model, image = trained(tmp_path)
    cut_power(image, 0)
    with Shard(image, fsync="never") as primary:
        assert bits(theta(primary)) == model
        primary.durability.replication.hear("standby", replica.held)
        take_all(replica, primary)
        assert replica.newest.manifest.generation == primary.model.generation
        assert not replica.is_ahead
    replica.close()


def test_a_head_of_a_segment_without_a_record_is_nothing_that_was_lost(cut_power, tmp_path):
    with Shard(tmp_path / "primary", fsync="never") as primary:
        begin(primary)
        replica = opened(tmp_path, fsync="never")
        model = push(primary, 1)
        primary.durability.take()
        take_all(replica, primary)
        image = after_a_crash(tmp_path / "primary")
    assert replica.held.position.offset == HEAD_BYTES
    cut_power(image, HEAD_BYTES)
    with Shard(image, fsync="never") as primary:
        assert bits(theta(primary)) == model
        primary.durability.replication.hear("standby", replica.held)
    replica.close()


def test_only_a_standby_of_the_history_that_was_left_is_refused(cut_power, tmp_path):
    replica, _, image = trained(tmp_path)
    cut_power(image, 1)
    with Shard(image, fsync="never") as primary:
        replication = primary.durability.replication
        for other in (0, primary.model.generation, 7):
            replication.hear("standby", replace(replica.held, generation=other))
        with pytest.raises(Rejected) as refused:
            replication.hear("standby", replica.held)
        assert refused.value.reason is ErrorCode.STANDBY_AHEAD
    replica.close()

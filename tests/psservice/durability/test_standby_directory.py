"""The directory of a standby can be served from whatever moment its last bytes came, and what counts as had there."""

from dataclasses import replace

import pytest

from psservice.durability.replication import Replication
from psservice.settings import ServerSettings
from psservice.storage import parts
from psservice.storage.environment import MACHINE
from psservice.storage.files import StorageError
from psservice.storage.journal import Position, segment_path
from psservice.storage.lock_file import read_watermark
from psservice.storage.parts import HeldPart, SnapshotPart
from psservice.storage.replica import Replica
from tests.psservice.durability.test_recovery import Shard, begin, send, theta
from tests.psservice.service_makers import bits, sparse_push
from tests.psservice.shard_makers import present


@pytest.fixture
def primary(tmp_path):
    with Shard(tmp_path / "primary") as shard:
        begin(shard)
        yield shard


def settings(tmp_path, **options):
    return ServerSettings(data_dir=tmp_path / "standby", standby_of="elsewhere:1", **options)


def opened(tmp_path, **options):
    return Replica(settings(tmp_path, **options), MACHINE)


def take(replica, primary):
    """Take one part; tell whether there was one."""
    held = replica.held
    part = primary.durability.next_part(held)
    if isinstance(part, SnapshotPart):
        pieces = iter([part.manifest.read(), part.tensors.read()])
        sizes = part.manifest_bytes, part.tensors_bytes
        replica.take_snapshot(*sizes, pieces, continues=part.continues)
        part.close()
    elif part is not None:
        replica.append(part.begin, part.data)
    return part is not None


def take_all(replica, primary):
    while take(replica, primary):
        pass


def push(shard, step):
    send(shard, step, sparse_push(shard.span, 0.5, step))
    return bits(theta(shard))


@pytest.mark.parametrize("fsync", ["never", "always"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_standby_serves_though_its_journal_ends_inside_a_record(fsync, is_killed, primary, tmp_path, monkeypatch):
    replica = opened(tmp_path, fsync=fsync)
    whole = push(primary, 1)
    take_all(replica, primary)
    monkeypatch.setattr(parts, "MOST_JOURNAL_BYTES", 50)
    push(primary, 2)
    for _ in range(3):
        assert take(replica, primary)
    assert replica.held.position < primary.durability.newest_position()
    replica.close()
    if is_killed:  # and begins anew, before it serves
        opened(tmp_path, fsync=fsync).close()
    with Shard(tmp_path / "standby", fsync=fsync) as served:
        assert bits(theta(served)) == whole


@pytest.mark.parametrize("most_bytes", [36, 41, 64, 1000])
def test_pieces_that_end_anywhere_make_the_same_journal(most_bytes, primary, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "MOST_JOURNAL_BYTES", most_bytes)
    replica = opened(tmp_path)
    for step in (1, 2):
        push(primary, step)
    last = push(primary, 3)
    take_all(replica, primary)
    replica.close()
    with Shard(tmp_path / "standby") as served:
        assert bits(theta(served)) == last


def test_a_missing_end_of_a_standbys_journal_is_no_torn_record(primary, tmp_path):
    replica = opened(tmp_path)
    push(primary, 1)
    take_all(replica, primary)
    segment, offset = replica.held.position
    replica.close()
    path = segment_path(replica.path / "journal", segment)
    with path.open("r+b") as file:
        file.truncate(offset - 1)
    with pytest.raises(StorageError, match="more bytes were acknowledged"), Shard(tmp_path / "standby"):
        pass


def test_a_segment_that_was_only_named_is_begun_again_and_those_before_stay(primary, tmp_path):
    replica = opened(tmp_path)
    last = push(primary, 1)
    take_all(replica, primary)
    held = replica.held
    replica.close()
    segment_path(replica.path / "journal", held.position.segment + 1).touch()
    again = opened(tmp_path)
    assert again.held == held
    again.close()
    with Shard(tmp_path / "standby") as served:
        assert bits(theta(served)) == last


def test_a_snapshot_of_ones_own_that_is_older_than_the_primarys_newest_is_dropped(primary, tmp_path):
    replica = opened(tmp_path)
    push(primary, 1)
    take_all(replica, primary)
    begun = replica.newest.manifest
    push(primary, 2)
    primary.durability.take()
    part = primary.durability.next_part(HeldPart(Position(), b"", 0))
    pieces = iter([part.manifest.read(), part.tensors.read()])
    newest = replica.take_snapshot(part.manifest_bytes, part.tensors_bytes, pieces, continues=part.continues)
    part.close()
    assert newest.manifest.segment > begun.segment
    assert replica.keep(begun, {}) is None
    assert replica.newest == newest
    replica.close()


# What counts as had


def test_a_position_counts_once_its_segment_was_compared(primary, tmp_path):
    replica = opened(tmp_path)
    push(primary, 1)
    take_all(replica, primary)
    held, replication = replica.held, primary.durability.replication
    end = primary.durability.newest_position()
    assert held.position == end

    def counts(part):
        replication.hear("standby", part)
        return not replication.progress(end, 1).behind_bytes

    assert not counts(held)
    assert primary.durability.must_compare(held)
    assert primary.durability.next_part(held) is None
    replication.compared(held)
    assert not primary.durability.must_compare(held)
    assert counts(held)
    assert not counts(HeldPart(Position(end.segment + 9, end.offset), b"8 others", held.generation))
    assert not counts(HeldPart(held.position, b"", held.generation))
    replica.close()


def test_nothing_counts_of_a_standby_that_has_another_model(primary, tmp_path):
    replica = opened(tmp_path)
    push(primary, 1)
    take_all(replica, primary)
    held, replication = replica.held, primary.durability.replication
    replication.hear("standby", held)
    replication.compared(held)
    replication.begin(present(primary) + 1)
    assert replication.progress(held.position, 1).behind_bytes
    replication.hear("standby", held)
    replication.compared(held)
    assert replication.progress(held.position, 1).behind_bytes, "what is behind that model's snapshot is of no use"
    replica.close()


def test_a_standby_that_had_everything_lacks_the_versions_since_then():
    """Also if it was answered when the bytes of the last version were written, and the version was not yet there."""
    replication = Replication(lambda: 0.0, is_required=False)
    held = HeldPart(Position(1, 100), b"a segment", 7)
    replication.begin(held.generation)
    replication.hear("standby", held)
    replication.compared(held)
    replication.answer(held.position, 4)
    replication.hear("standby", held)
    assert replication.progress(held.position, 5).behind_versions == 0
    assert replication.progress(Position(1, 160), 6).behind_versions == 1


def test_a_standbys_journal_is_forced_to_the_disk_every_period(primary, tmp_path):
    now = [0.0]
    environment = replace(MACHINE, monotonic=lambda: now[0])
    replica = Replica(settings(tmp_path, fsync="interval", fsync_interval_seconds=2.0), environment)
    push(primary, 1)
    take_all(replica, primary)

    def durable():
        replica.sync_in_time()
        found = read_watermark(replica.path, MACHINE.files)
        assert found.appended == replica.held.position.offset
        return found.durable == found.appended

    now[0] = 1.9
    assert not durable()
    now[0] = 2.0
    assert durable()
    push(primary, 2)
    take_all(replica, primary)
    assert not durable()
    replica.close()

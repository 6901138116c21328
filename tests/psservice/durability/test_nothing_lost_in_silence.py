"""Whoever takes something away that was acknowledged, a shard never begins without it in silence."""

import os
import shutil

import pytest

from psservice.shard.join import leave
from psservice.shard.rollback import roll_back
from psservice.storage.files import DISK, StorageError
from psservice.storage.journal import segment_numbers, segment_path
from psservice.storage.journal_format import HEAD_BYTES
from tests.psservice.durability.test_recovery import (
    LAYOUT,
    START,
    Shard,
    after_a_crash,
    assert_same,
    begin,
    send,
    theta,
    values,
)
from tests.psservice.service_makers import bits, sparse_push
from tests.psservice.shard_makers import BERT, join, present, serving_shards
from verify.failpoint.copies import image


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "live"


@pytest.fixture
def crashed(directory):
    """What a shard leaves that was killed after three acknowledged pushes: its directory, generation and values."""
    with Shard(directory) as shard:
        begin(shard)
        for step in (1, 2):
            send(shard, step, sparse_push(shard.span, 0.5, step))
        shard.durability.take()
        send(shard, 3, sparse_push(shard.span, 0.5, 3))
        yield after_a_crash(directory), present(shard), bits(theta(shard))


def folder(directory):
    return directory / "shard-0-of-1"


def newest_segment(directory):
    journal = folder(directory) / "journal"
    return segment_path(journal, segment_numbers(DISK, journal)[-1])


def assert_goes_back_when_told_to(directory, generation):
    """With ``last-good`` the shard goes on from an older version, under a history of its own; so it does afterwards."""
    with Shard(directory, recover="last-good") as again:
        assert again.model.version < 3
        assert present(again) != generation
        version, began = again.model.version, present(again)
    with Shard(directory) as third:
        assert (third.model.version, present(third)) == (version, began)


@pytest.mark.parametrize("place", range(20))
def test_a_flipped_bit_in_the_head_of_the_newest_segment_is_refused_by_name(place, crashed):
    directory, generation, _ = crashed
    path = newest_segment(directory)
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << place % 8
    path.write_bytes(data)
    with pytest.raises(StorageError, match=path.name):
        Shard(directory)
    assert_goes_back_when_told_to(directory, generation)


@pytest.mark.parametrize("cut", [1, 7, 40, "the record", "all records", "the head", "everything"])
def test_an_acknowledged_record_that_is_cut_off_is_refused_by_name(cut, crashed):
    directory, generation, _ = crashed
    path = newest_segment(directory)
    size = path.stat().st_size
    left = {"the record": 60, "all records": 20, "the head": 11, "everything": 0}
    os.truncate(path, left[cut] if isinstance(cut, str) else size - cut)
    with pytest.raises(StorageError, match=path.name):
        Shard(directory)
    assert_goes_back_when_told_to(directory, generation)


def test_a_flipped_bit_in_the_last_acknowledged_record_is_refused_by_name(crashed):
    directory, generation, _ = crashed
    path = newest_segment(directory)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match=path.name):
        Shard(directory)
    assert_goes_back_when_told_to(directory, generation)


@pytest.mark.parametrize("half", [b"", b"\0" * 100, "half a record"])
def test_what_the_server_had_not_finished_writing_when_it_was_killed_stops_nobody(half, crashed):
    directory, generation, parameters = crashed
    path = newest_segment(directory)
    data = path.read_bytes()
    path.write_bytes(data + (data[20:80] if half == "half a record" else half))
    with Shard(directory) as again:
        assert (again.model.version, present(again), bits(theta(again))) == (3, generation, parameters)


def test_a_torn_tail_after_a_power_cut_begins_a_new_history(directory, monkeypatch):
    with Shard(directory, fsync="always") as shard:
        begin(shard)
        send(shard, 1, sparse_push(shard.span, 0.5, 1))
        shard.durability.records.wait()
        copy, generation = after_a_crash(directory), present(shard)
    path = newest_segment(copy)
    whole = copy.with_name("whole")
    image(copy, whole)
    with path.open("ab") as file:
        file.write(path.read_bytes()[20:60])
    monkeypatch.setattr("psservice.storage.files.Files.boot_id", lambda _: "another")
    with Shard(copy, fsync="always") as again:
        assert again.model.version == 1
        assert present(again) != generation
    with Shard(whole, fsync="always") as again:
        assert (again.model.version, present(again)) == (1, generation)


@pytest.mark.parametrize("left", ["nothing", "an empty file", "half a head"])
def test_a_server_that_was_stopped_goes_on_behind_a_power_cut_that_took_its_last_empty_segment(
    directory, monkeypatch, left
):
    with Shard(directory, fsync="never") as shard:
        begin(shard)
        send(shard, 1, sparse_push(shard.span, 0.5, 1))
        generation = present(shard)
    path = newest_segment(directory)
    if left == "nothing":
        path.unlink()
    else:
        os.truncate(path, 0 if left == "an empty file" else HEAD_BYTES // 2)
    monkeypatch.setattr("psservice.storage.files.Files.boot_id", lambda _: "another")
    with Shard(directory, fsync="never") as again:
        assert (again.model.version, present(again)) == (1, generation)


def test_what_was_on_the_disk_before_a_power_cut_and_is_gone_is_refused(directory, monkeypatch):
    with Shard(directory, fsync="always") as shard:
        begin(shard)
        for step in range(1, 4):
            send(shard, step, sparse_push(shard.span, 0.5, step))
            shard.durability.records.wait()
        copy, generation = after_a_crash(directory), present(shard)
    path = newest_segment(copy)
    os.truncate(path, path.stat().st_size // 2)
    monkeypatch.setattr("psservice.storage.files.Files.boot_id", lambda _: "another")
    with pytest.raises(StorageError, match=path.name):
        Shard(copy, fsync="always")
    assert_goes_back_when_told_to(copy, generation)


def test_the_newest_segment_that_is_gone_is_refused_by_name(crashed):
    directory, generation, _ = crashed
    path = newest_segment(directory)
    path.unlink()
    with pytest.raises(StorageError, match=path.name):
        Shard(directory)
    assert_goes_back_when_told_to(directory, generation)


def test_the_newest_of_several_segments_that_is_gone_is_refused_by_name(directory):
    with Shard(directory) as shard:
        begin(shard)
        copy = after_a_crash(directory)
    with Shard(copy) as shard:  # begins a segment behind that of the life before
        send(shard, 1, sparse_push(shard.span, 0.5, 1))
        third = copy.with_name("third")
        image(copy, third)
    path = newest_segment(third)
    path.unlink()
    with pytest.raises(StorageError, match=path.name):
        Shard(third)


def test_a_segment_in_the_middle_that_is_gone_is_refused_by_name(directory):
    with Shard(directory) as shard:
        begin(shard)
        first = segment_numbers(DISK, folder(directory) / "journal")[-1]
        copy = after_a_crash(directory)
    for life in range(2):
        with Shard(copy) as shard:
            join(shard, LAYOUT, BERT)
            leave(shard, BERT)
            following = copy.with_name(f"life{life}")
            image(copy, following)
        copy = following
    path = segment_path(folder(copy) / "journal", first + 1)
    path.unlink()
    with pytest.raises(StorageError, match=path.name):
        Shard(copy)


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("durability", ["journal", "snapshot"])
def test_where_all_snapshots_are_gone_the_server_does_not_begin_anew(durability, stopped, directory):
    with Shard(directory, durability=durability) as shard:
        begin(shard)
        send(shard, 1, sparse_push(shard.span, 0.5, 1))
        copy = after_a_crash(directory)
    copy = directory if stopped else copy
    for snapshot in (folder(copy) / "snapshots").iterdir():
        shutil.rmtree(snapshot)
    for mode in ("strict", "last-good"):  # there is no good version to go back to
        with pytest.raises(StorageError, match=r"snapshots.*copy"):
            Shard(copy, durability=durability, recover=mode)


def test_the_newest_snapshot_that_is_gone_costs_nothing_where_the_journal_has_everything(crashed):
    directory, generation, parameters = crashed
    shutil.rmtree(max((folder(directory) / "snapshots").iterdir()))
    with Shard(directory) as again:
        assert (again.model.version, present(again), bits(theta(again))) == (3, generation, parameters)


def test_the_newest_snapshot_that_is_gone_and_covered_by_no_journal_begins_a_new_history(directory):
    with Shard(directory, durability="snapshot") as shard:
        begin(shard)
        send(shard, 1, sparse_push(shard.span, 0.5, 1))
        generation = present(shard)
    shutil.rmtree(max((folder(directory) / "snapshots").iterdir()))
    with Shard(directory, durability="snapshot") as again:
        assert again.model.version == 0
        assert present(again) != generation


@pytest.mark.parametrize("what", ["state.safetensors", "manifest.json", "all of it"])
def test_the_snapshot_with_which_the_model_began_anew_is_not_passed_over(what, directory):
    with Shard(directory) as shard:
        begin(shard)
        send(shard, 1, sparse_push(shard.span, 0.5, 1))
        generation = present(shard)
        roll_back(shard, 0, "")
        copy = after_a_crash(directory)
    newest = max((folder(copy) / "snapshots").iterdir())
    if what == "all of it":
        shutil.rmtree(newest)
    else:
        (newest / what).write_bytes(b"")
    with pytest.raises(StorageError, match=newest.name.partition("-")[0]):
        Shard(copy)
    with Shard(copy, recover="last-good") as again:
        assert again.model.version == 1
        assert present(again) != generation


def test_a_flipped_bit_in_a_manifest_is_not_begun_from(crashed):
    directory, generation, parameters = crashed
    path = max((folder(directory) / "snapshots").iterdir()) / "manifest.json"
    text = path.read_text()
    assert '"version": 2,' in text
    path.write_text(text.replace('"version": 2,', '"version": 3,', 1))
    with Shard(directory) as again:  # from the snapshot before it
        assert (again.model.version, present(again), bits(theta(again))) == (3, generation, parameters)


def test_a_second_server_is_kept_out_also_where_the_lock_was_removed(directory):
    with Shard(directory) as shard:
        begin(shard)
        (folder(directory) / "lock").unlink()
        for _ in range(2):
            with pytest.raises(StorageError, match=r"lock.*no server"):
                Shard(directory)
        send(shard, 1, sparse_push(shard.span, 0.5, 1))


def test_a_lock_that_was_lost_is_made_anew_when_told_to(crashed):
    directory, generation, _ = crashed
    (folder(directory) / "lock").unlink()
    with Shard(directory, recover="last-good") as again:
        assert again.model.version == 3
        assert present(again) != generation
        copy = after_a_crash(directory)
        with Shard(copy) as third:
            assert_same(third, again)


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_another_number_of_shards_does_not_begin_empty_beside_what_is_kept(first, then, directory):
    with serving_shards(first, LAYOUT, values(), START, data_dir=directory):
        pass
    with pytest.raises(StorageError, match=f"--num-shards {first}.*--init"):
        Shard(directory, num_shards=then)
    assert not (directory / f"shard-0-of-{then}").exists()
    old = directory.with_name("old")
    image(directory, old)
    with Shard(directory, num_shards=then, init=old) as shard:
        assert shard.model is None  # until the first worker has said what the model is
    with pytest.raises(StorageError, match=f"--num-shards {first}.*--init"):
        Shard(directory, num_shards=then)  # nothing came of that


def test_a_shard_whose_snapshots_were_left_half_written_removes_them_when_it_starts(crashed):
    directory, _, _ = crashed
    dead = folder(directory) / "snapshots" / ".000000000009-v3.0a1b2c3d.tmp"
    dead.mkdir()
    (dead / "state.safetensors").write_bytes(bytes(100))
    with Shard(directory):
        assert not dead.exists()

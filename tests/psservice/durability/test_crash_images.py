"""What the disk holds where a server died at an unlucky moment, and what the next ones make of it."""

import json
import os
import zlib

import pytest
import torch

from pscore.model.sparse_slice import SparseSlice
from pscore.wire.errors import Rejected
from psservice.durability.replay import Past
from psservice.settings import ShardSettings
from psservice.storage import files, lock_file, recovery_source, snapshots
from psservice.storage.files import DISK, StorageError
from psservice.storage.journal import segment_numbers, segment_path
from psservice.storage.journal_format import HEAD_BYTES
from psservice.storage.manifest import Manifest
from tests.psservice.durability.test_recovery import Shard, after_a_crash, assert_same, begin, send
from tests.psservice.service_makers import bits, sparse_push
from tests.psservice.shard_makers import present, theta
from verify.failpoint.copies import image


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "live"


def journal_of(directory):
    return directory / "shard-0-of-1" / "journal"


def test_what_a_former_life_wrote_is_forced_to_the_disk_before_it_is_served(directory, monkeypatch):
    with Shard(directory, fsync="interval") as shard:
        begin(shard)
        send(shard, 1, sparse_push(shard.span, 0.5, 1))
        copy = after_a_crash(directory)
        pushed = segment_path(journal_of(copy), segment_numbers(DISK, journal_of(copy))[-1])
    forced = []
    monkeypatch.setattr(files.Files, "sync", lambda _, path: forced.append(path))
    with Shard(copy, fsync="always"):
        assert pushed in forced


def test_a_segment_that_was_just_created_stops_nobody(directory):
    with Shard(directory) as shard:
        begin(shard)
        send(shard, 1, sparse_push(shard.span, 0.5, 1))
        copy = after_a_crash(directory)
        last = segment_numbers(DISK, journal_of(copy))[-1]
        segment_path(journal_of(copy), last + 1).touch()  # died between creating the file and writing its head
    with Shard(copy) as again:
        send(again, 2, sparse_push(again.span, 0.5, 2))
        image(copy, directory.with_name("third"))
        with Shard(directory.with_name("third")) as third:
            assert_same(third, again)


def test_a_segment_is_on_the_disk_before_there_is_a_next_one(directory, monkeypatch):
    with Shard(directory, fsync="always") as shard:
        begin(shard)
        send(shard, 1, sparse_push(shard.span, 0.5, 1))
        before, real = segment_numbers(DISK, journal_of(directory)), os.fdatasync
        seen = []

        def fsync(descriptor):
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if name.endswith(f"{before[-1]:012d}.journal"):
                seen.append(segment_numbers(DISK, journal_of(directory)))
            real(descriptor)

        monkeypatch.setattr(os, "fdatasync", fsync)
        shard.durability.take_asked("")
        assert seen == [before]


def test_a_damaged_snapshot_leaves_its_number_to_nobody(directory):
    with Shard(directory, durability="snapshot") as shard:
        begin(shard)
        generation = present(shard)
    newest = max((directory / "shard-0-of-1" / "snapshots").iterdir())
    (newest / "state.safetensors").write_bytes(b"")
    with Shard(directory, durability="snapshot") as again:
        assert again.model.version == 0
        assert present(again) != generation


@pytest.mark.parametrize("file", ["state.safetensors", "manifest.json"])
def test_versions_behind_a_damaged_snapshot_that_no_journal_reaches_begin_a_new_history(file, directory):
    with Shard(directory, durability="journal") as shard:
        begin(shard)
        send(shard, 1, sparse_push(shard.span, 0.5, 1))
        copy = after_a_crash(directory)
    with Shard(copy, durability="snapshot") as shard:
        generation = present(shard)
        send(shard, 2, sparse_push(shard.span, 0.5, 2))
        again = copy.with_name("again")
        image(copy, again)
    (max((again / "shard-0-of-1" / "snapshots").iterdir()) / file).write_bytes(b"")
    with Shard(again, durability="journal") as third:
        assert third.model.version == 1
        assert present(third) != generation


def test_a_push_that_was_refused_is_refused_again_by_the_next(directory):
    with Shard(directory) as shard:
        begin(shard)
        send(shard, 1, sparse_push(shard.span, 0.5, 1))
        huge = SparseSlice(shard.span, torch.tensor([3]), torch.tensor([-3e38]))
        send(shard, 2, huge)
        for _ in range(2):
            with pytest.raises(Rejected):
                send(shard, 3, huge)
        copy = after_a_crash(directory)
        with Shard(copy) as again:
            assert_same(again, shard)
            send(again, 4, sparse_push(again.span, 0.5, 4))
            third = directory.with_name("third")
            image(copy, third)
            with Shard(third) as last:
                assert_same(last, again)


def test_a_snapshot_that_is_half_removed_goes_with_the_next(directory, monkeypatch):
    with Shard(directory, keep_snapshots=1) as shard:
        begin(shard)
        real = files.Path.unlink

        def die(path, **options):
            if path.name == "state.safetensors":
                real(path.with_name("manifest.json"))
                raise OSError(5, "the server died here")

        with monkeypatch.context() as patched:
            patched.setattr(files.Path, "unlink", die)
            send(shard, 1, sparse_push(shard.span, 0.5, 1))
            shard.durability.take()
        shard.durability.take()
        assert len(list((directory / "shard-0-of-1" / "snapshots").iterdir())) == 1


def test_a_segment_that_was_removed_meanwhile_is_said_to_be(directory):
    with Shard(directory) as shard:
        begin(shard)
        kept = recovery_source.newest_source(directory / "shard-0-of-1")
        history = Past(kept, torch.device("cpu"), ShardSettings())
        real = recovery_source.segment_numbers
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(recovery_source, "segment_numbers", lambda *where: [*real(*where), real(*where)[-1] + 1])
            with pytest.raises(StorageError, match="cannot read"):
                list(history.replay())
        assert snapshots.readable(DISK, directory / "shard-0-of-1" / "snapshots")
        assert bits(theta(shard)) == bits(history.model.theta)


def test_where_no_manifest_can_be_read_the_server_does_not_begin_anew(directory):
    with Shard(directory) as shard:
        begin(shard)
    for manifest in directory.glob("*/snapshots/*/manifest.json"):
        manifest.write_bytes(b"{")
    with pytest.raises(StorageError, match="no snapshot"):
        Shard(directory)


@pytest.mark.parametrize("stopped", [True, False])
@pytest.mark.parametrize("modes", ["snapshot journal journal", "journal snapshot journal", "snapshot snapshot journal"])
def test_lives_may_differ_in_how_they_keep(modes, stopped, directory):
    former = None
    for number, mode in enumerate(modes.split(), start=1):
        with Shard(directory, durability=mode, keep_snapshots=1) as shard:
            if former is None:
                begin(shard)
            else:
                assert bits(theta(shard)) == former
            send(shard, number, sparse_push(shard.span, 0.5, number))
            if mode == "snapshot" and not stopped:
                shard.durability.take()
            former, behind = bits(theta(shard)), directory.with_name(f"image{number}")
            image(directory, behind)
        directory = directory if stopped else behind
    with Shard(directory, durability="journal") as last:
        assert bits(theta(last)) == former


@pytest.mark.parametrize("fsync", ["interval", "never"])
def test_a_life_is_judged_by_its_own_promise(fsync, directory, monkeypatch):
    with Shard(directory, fsync="always") as shard:
        begin(shard)
        copy = after_a_crash(directory)
    forced, real = {}, os.fdatasync

    def fsync_and_tell(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name.endswith("/lock"):
            forced[name] = lock_file.read_watermark(copy / "shard-0-of-1", DISK)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", fsync_and_tell)
    with Shard(copy, fsync=fsync):
        assert [watermark.fsync for watermark in forced.values()] == [fsync]


@pytest.mark.parametrize(
    "change", [{"run_state": "evil"}, {"start": -5}, {"segment": 1 << 80}, {"generation": -1}, {"version": -1}]
)
def test_a_manifest_that_makes_no_sense_is_not_begun_from(change, directory):
    with Shard(directory) as shard:
        begin(shard)
    for path in directory.glob("*/snapshots/*/manifest.json"):
        plain = json.loads(path.read_text()) | change
        whole = Manifest.model_construct(**plain | {"crc32": 0})
        path.write_text(json.dumps(plain | {"crc32": zlib.crc32(whole.model_dump_json(warnings=False).encode())}))
    with pytest.raises(StorageError):
        Shard(directory)


def test_a_snapshot_is_published_whole_or_not_at_all(directory, monkeypatch):
    with Shard(directory) as shard:
        begin(shard)
        before = sorted((directory / "shard-0-of-1" / "snapshots").iterdir())
        with monkeypatch.context() as patched:
            patched.setattr(files.Files, "write", full)
            with pytest.raises(StorageError, match="No space"):
                shard.durability.take()
        assert sorted((directory / "shard-0-of-1" / "snapshots").iterdir()) == before


def test_a_server_that_died_before_its_first_segment_leaves_no_gap(directory, monkeypatch):
    with Shard(directory) as shard:
        begin(shard)
        copy = after_a_crash(directory)
    with monkeypatch.context() as patched:
        patched.setattr(files.Files, "open_new", full)
        with pytest.raises(StorageError, match="cannot write"):
            Shard(copy)
    with Shard(copy) as shard:
        send(shard, 1, sparse_push(shard.span, 0.5, 1))
        third = copy.with_name("third")
        image(copy, third)
        with Shard(third) as again:
            assert_same(again, shard)


def test_a_record_that_does_not_follow_is_refused_and_last_good_goes_back_before_it(directory):
    with Shard(directory) as shard:
        begin(shard)
        copy = after_a_crash(directory)
    for step in (1, 2, 3):
        with Shard(copy) as shard:
            send(shard, step, sparse_push(shard.span, 0.5, step))
            following = copy.with_name(f"life{step}")
            image(copy, following)
        copy = following
    second = segment_path(journal_of(copy), segment_numbers(DISK, journal_of(copy))[-2])
    os.truncate(second, HEAD_BYTES)  # cut behind its head: exactly between two records
    with pytest.raises(StorageError, match="cannot be applied"):
        Shard(copy)
    with Shard(copy, recover="last-good") as again:
        assert again.model.version == 1


def full(*_):
    raise OSError(28, "No space left on device")

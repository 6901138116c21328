"""Data of another release are called that, and never damaged: no way of recovering may change or drop them."""

import json
import shutil
from pathlib import Path

import pytest

from psservice.durability.earlier_models import write_model
from psservice.state.records import KINDS, body_of
from psservice.storage.files import StorageError
from psservice.storage.formats import OtherReleaseError
from tests.psservice.durability.test_recovery import LAYOUT, Shard, after_a_crash, assert_same, begin, send
from tests.psservice.service_makers import sparse_push
from tests.psservice.shard_makers import join, theta

RELEASES = {"a newer release": 1, "an earlier release": -1}


@pytest.fixture
def directory(tmp_path):
    with Shard(tmp_path / "live") as shard:
        begin(shard)
        send(shard, 1, sparse_push(shard.span, 0.5, 1))
    return tmp_path / "live"


def change_mark(path, by):
    data = path.read_bytes()
    path.write_bytes(data[:7] + str(int(data[7:8]) + by).encode() + data[8:])


def change_lock(directory, by):
    change_mark(directory / "shard-0-of-1" / "lock", by)


def change_journal(directory, by):
    for path in (directory / "shard-0-of-1" / "journal").iterdir():
        change_mark(path, by)


def change_manifest(directory, by):
    for path in (directory / "shard-0-of-1").rglob("manifest.json"):
        plain = json.loads(path.read_bytes())
        path.write_text(json.dumps(plain | {"format": plain["format"] + by, "what nobody knows": 1}))


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("recover", ["strict", "last-good"])
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("change", [change_lock, change_journal, change_manifest])
def test_data_of_another_release_are_named_and_left_alone(change, release, recover, directory):
    change(directory, RELEASES[release])
    before = contents(directory)
    with pytest.raises(OtherReleaseError, match=f"was written by {release}") as refused:
        Shard(directory, recover=recover)
    said = str(refused.value).split("If no other release")[0]
    assert not any(words in said for words in ("damaged", "last-good", "empty", "copy", "pydantic"))
    assert contents(directory) == before


@pytest.mark.parametrize("change", [change_lock, change_journal, change_manifest])
def test_a_reader_names_the_other_release_too(change, directory, tmp_path):
    change(directory, 1)
    with pytest.raises(StorageError, match="a newer release"):
        write_model(directory, tmp_path / "out.safetensors", version=None, checkpoint="")


@pytest.mark.parametrize("recover", ["strict", "last-good"])
def test_a_record_of_a_kind_that_only_a_newer_release_knows_is_no_damage(recover, directory):
    with Shard(directory) as shard:
        shard.durability.records.journal.append(max(KINDS) + 1, body_of([b"what nobody knows"]))
        shard.durability.close = shard.durability.abandon  # killed
    before = contents(directory)
    with pytest.raises(OtherReleaseError, match="a newer release"):
        Shard(directory, recover=recover)
    assert contents(directory) == before


# A directory that a release before 0.1.0 has left, with journals of format 2


@pytest.fixture
def left(tmp_path):
    """A run of three pushes, and a clean stop."""
    shutil.copytree(Path(__file__).parent / "before_0_1_0", tmp_path / "left")
    return tmp_path / "left"


def test_a_directory_of_an_earlier_release_that_was_stopped_is_opened_from_its_snapshot(left):
    with Shard(left) as shard:
        assert shard.model.version == 3
        assert int(theta(shard).double().sum() * 1e4) == -12415  # as it was left
        join(shard, LAYOUT)
        answer, _ = send(shard, 4, sparse_push(shard.span, 0.5, 1), base=3)
        assert answer.version == 4
        with Shard(after_a_crash(left)) as again:
            assert_same(again, shard)


def test_an_upgrade_that_is_killed_at_once_is_made_again(left):
    shard = Shard(left).engine
    copy = after_a_crash(left)
    shard.close()
    with Shard(copy) as again:
        assert again.model.version == 3


def test_records_of_an_earlier_release_behind_the_snapshot_name_the_release_to_stop(left):
    shutil.rmtree(left / "shard-0-of-1" / "snapshots" / "000000000003-v3")
    lock = left / "shard-0-of-1" / "lock"
    lock.unlink()
    before = contents(left)
    with pytest.raises(
        OtherReleaseError, match=r"before psservice 0.1.0.*Start the release that wrote them and stop it"
    ):
        Shard(left, recover="last-good")
    assert {path: data for path, data in contents(left).items() if path != lock} == before

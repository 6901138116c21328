"""A shard that begins from a copy of its directory: in a history of its own, from whatever moment the copy has."""

import os
import shutil
from itertools import permutations

import pytest

from psservice.durability.earlier_models import replay_to
from psservice.settings import ShardSettings
from psservice.storage.files import DISK, Place, StorageError
from tests.psservice.durability.test_recovery import Shard, begin, send, theta
from tests.psservice.service_makers import bits, sparse_push
from tests.psservice.shard_makers import present
from tests.tiers import long_but

PARTS = ("journal", "lock", "snapshots")


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "live"


def folder(directory):
    return directory / "shard-0-of-1"


def copy_part(name, directory, to):
    source, target = folder(directory) / name, folder(to) / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy2(source, target)


def test_a_copy_begins_a_new_history_once(directory, tmp_path):
    with Shard(directory) as shard:
        begin(shard)
        send(shard, 1, sparse_push(shard.span, 0.5, 1))
        generation, values = present(shard), bits(theta(shard))
    shutil.copytree(directory, tmp_path / "copy")
    with Shard(tmp_path / "copy") as again:
        assert bits(theta(again)) == values
        began = present(again)
        assert began != generation
        assert began >> 32 == generation >> 32
    with Shard(tmp_path / "copy") as third:
        assert present(third) == began
    with Shard(directory) as original:
        assert present(original) == generation


def test_a_copy_that_took_the_place_of_its_original_begins_a_new_history(directory, tmp_path):
    """A file system may give a new file the number of one that was just removed."""
    with Shard(directory) as shard:
        begin(shard)
        generation = present(shard)
        shutil.copytree(directory, tmp_path / "copy")
    shutil.rmtree(directory)
    shutil.copytree(tmp_path / "copy", directory)
    with Shard(directory) as again:
        assert present(again) != generation


def test_a_directory_that_was_moved_or_changed_its_owner_goes_on(directory, tmp_path):
    with Shard(directory, fsync="always") as shard:
        begin(shard)
        generation = present(shard)
    lock = folder(directory) / "lock"
    lock.chmod(0o600)
    os.chown(lock, os.getuid(), os.getgid())
    os.utime(lock, (0, 0))
    directory.rename(tmp_path / "moved")
    with Shard(tmp_path / "moved", fsync="always") as again:
        assert present(again) == generation


@pytest.mark.parametrize("is_busy", long_but([True], [False, True]), ids=["pushes", "pushes and snapshots"])
@pytest.mark.parametrize("order", [*permutations(PARTS)], ids="-".join)
def test_a_copy_made_while_the_server_runs_serves_in_any_order(order, is_busy, directory, tmp_path):
    models, copy = {}, tmp_path / "copy"
    with Shard(directory) as shard:
        begin(shard)
        for step in range(1, 7):
            send(shard, step, sparse_push(shard.span, 0.5, step))
            models[shard.model.version] = bits(theta(shard))
            if step % 2 == 0:
                copy_part(order[step // 2 - 1], directory, copy)
                if is_busy:
                    shard.durability.take()
        generation = present(shard)
    alone = replay_to(folder(copy), DISK, shard.device, ShardSettings(), None, "")
    with Shard(copy) as again:
        assert again.model.version == alone.model.version >= 2
        assert bits(theta(again)) == models[again.model.version]
        assert present(again) != generation
        began, version = present(again), again.model.version
        send(again, 7, sparse_push(again.span, 0.5, 7))
    with Shard(copy) as third:
        assert (present(third), third.model.version) == (began, version + 1)


def test_a_copy_of_a_stopped_servers_directory_must_be_whole(directory, tmp_path):
    copy = tmp_path / "copy"
    with Shard(directory) as shard:
        begin(shard)
        send(shard, 1, sparse_push(shard.span, 0.5, 1))
    shutil.copytree(directory, copy)
    for path in (folder(copy) / "journal").iterdir():
        os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(StorageError, match="acknowledged"):
        Shard(copy)


def test_a_place_that_is_not_known_is_no_other_place():
    assert Place(7, 9).is_another(Place(8, 9))
    assert Place(7, 9).is_another(Place(7, 8))
    assert not Place(7, 9).is_another(Place(7, 0))
    assert not Place(0, 0).is_another(Place(7, 9))

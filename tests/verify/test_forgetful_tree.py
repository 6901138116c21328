"""What a power cut leaves of files and names, on both kinds of file system."""

import random
import stat

import pytest

from verify.forgetful.tree import SECTOR_BYTES, Tree

KINDS = ("any", "journaled")
SEEDS = range(60)


def images(kind, prepare):
    """Return the trees that cuts leave, each of a tree that was prepared alike."""
    left = []
    for seed in SEEDS:
        tree = Tree(kind)
        prepare(tree)
        tree.forget(random.Random(seed))
        left.append(tree)
    return left


def sync_names(tree, path="/"):
    tree.sync(tree.directory(path))


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_synced_is_there_with_its_name(kind):
    def prepare(tree):
        tree.make_directory("/d", 0o700)
        file = tree.create("/d/f", 0o600)
        file.write(0, b"x" * 3000)
        tree.sync(file)
        sync_names(tree, "/d")
        sync_names(tree)

    for tree in images(kind, prepare):
        file = tree.file("/d/f")
        assert bytes(file.data) == b"x" * 3000
        assert stat.S_IMODE(file.mode) == 0o600


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_not_synced_may_be_there_or_not(kind):
    def prepare(tree):
        tree.create("/named", 0o600).write(0, b"x" * 4 * SECTOR_BYTES)
        sync_names(tree)
        tree.create("/unnamed", 0o600)

    trees = images(kind, prepare)
    assert {"unnamed" in tree.root.entries for tree in trees} == {True, False}
    sizes = {len(tree.file("/named").data) for tree in trees}
    assert {0, 4 * SECTOR_BYTES} <= sizes
    assert len(sizes) > 2


def test_any_kind_may_lose_sectors_in_the_middle_and_a_journaled_one_loses_the_end():
    def prepare(tree):
        file = tree.create("/f", 0o600)
        sync_names(tree)
        for sector in range(4):
            file.write(sector * SECTOR_BYTES, bytes([sector + 1]) * SECTOR_BYTES)

    def written(tree):
        data = tree.file("/f").data
        return [data[at] != 0 for at in range(0, len(data), SECTOR_BYTES)]

    assert any(False in written(tree) for tree in images("any", prepare))
    assert all(False not in written(tree) for tree in images("journaled", prepare))


def test_a_sector_has_an_earlier_content_or_the_last_one_and_no_mixture():
    def prepare(tree):
        file = tree.create("/f", 0o600)
        file.write(0, b"a" * 20)
        tree.sync(file)
        sync_names(tree)
        file.write(0, b"b" * 10)
        file.write(10, b"c" * 10)

    found = {bytes(tree.file("/f").data) for tree in images("any", prepare)}
    assert found == {b"a" * 20, b"b" * 10 + b"a" * 10, b"b" * 10 + b"c" * 10}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_has_one_name_after_a_rename_was_cut(kind):
    def prepare(tree):
        file = tree.create("/new", 0o600)
        file.write(0, b"new")
        tree.sync(file)
        old = tree.create("/f", 0o600)
        old.write(0, b"old")
        tree.sync(old)
        sync_names(tree)
        tree.rename("/new", "/f")

    found = set()
    for tree in images(kind, prepare):
        assert bytes(tree.file("/f").data) == (b"old" if "new" in tree.root.entries else b"new")
        found.add("new" in tree.root.entries)
    assert found == {True, False}


def test_a_sync_of_a_file_keeps_names_on_a_journaled_file_system_alone():
    def prepare(tree):
        file = tree.create("/f", 0o600)
        file.write(0, b"x")
        tree.sync(file)

    assert all("f" in tree.root.entries for tree in images("journaled", prepare))
    assert not all("f" in tree.root.entries for tree in images("any", prepare))


def test_names_are_kept_in_order_on_a_journaled_file_system_alone():
    def prepare(tree):
        for name in "abcd":
            tree.create(f"/{name}", 0o600)

    assert all("abcd".startswith("".join(tree.root.entries)) for tree in images("journaled", prepare))
    assert not all("abcd".startswith("".join(tree.root.entries)) for tree in images("any", prepare))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_was_cut_off_has_some_size_that_it_had(kind):
    def prepare(tree):
        file = tree.create("/f", 0o600)
        file.write(0, b"x" * 100)
        tree.sync(file)
        sync_names(tree)
        file.resize(40)
        file.write(40, b"y" * 20)

    found = {bytes(tree.file("/f").data) for tree in images(kind, prepare)}
    assert found == {b"x" * 100, b"x" * 40, b"x" * 40 + b"y" * 20}


def test_names_that_are_taken_or_not_there_are_refused():
    tree = Tree()
    tree.make_directory("/d", 0o700)
    tree.create("/d/f", 0o600)
    for call, error in (
        (lambda: tree.create("/d/f", 0o600), FileExistsError),
        (lambda: tree.unlink("/d"), IsADirectoryError),
        (lambda: tree.find("/d/g"), FileNotFoundError),
        (lambda: tree.find("/d/f/g"), NotADirectoryError),
        (lambda: tree.remove_directory("/d/f"), NotADirectoryError),
        (lambda: tree.remove_directory("/d"), OSError),
    ):
        with pytest.raises(error):
            call()
    tree.unlink("/d/f")
    tree.remove_directory("/d")
    assert not tree.root.entries

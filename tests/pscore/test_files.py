"""Files and folders are on the disk before anybody relies on their names."""

import os
import stat

import pytest

from pscore.files import make_folder, put_in_place


@pytest.fixture
def happened(monkeypatch):
    """Note each sync and rename by the inode number of what it is about."""
    notes = []
    sync, replace = os.fsync, os.replace

    def synced(descriptor):
        notes.append(("synced", os.fstat(descriptor).st_ino))
        sync(descriptor)

    def renamed(source, target):
        replace(source, target)
        notes.append(("renamed", os.stat(target).st_ino))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    return notes


def number(path):
    return path.stat().st_ino


def test_a_file_gets_its_name_when_its_contents_are_on_the_disk_and_keeps_it_from_then_on(tmp_path, happened):
    path, temporary = tmp_path / "f", tmp_path / ".f.tmp"
    path.write_bytes(b"earlier")
    temporary.write_bytes(b"whole")
    put_in_place(temporary, path)
    assert path.read_bytes() == b"whole"
    assert not temporary.exists()
    assert happened == [("synced", number(path)), ("renamed", number(path)), ("synced", number(tmp_path))]


def test_a_file_that_cannot_be_synced_does_not_get_the_name(tmp_path, monkeypatch):
    path, temporary = tmp_path / "f", tmp_path / ".f.tmp"
    path.write_bytes(b"earlier")
    temporary.write_bytes(b"whole")

    def refuse(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        put_in_place(temporary, path)
    assert path.read_bytes() == b"earlier"


def test_each_folder_that_is_made_is_synced_in_the_one_above_and_one_that_is_there_is_left_alone(tmp_path, happened):
    path = tmp_path / "a" / "b" / "c"
    make_folder(path, 0o700)
    above = [number(each) for each in (tmp_path / "a" / "b", tmp_path / "a", tmp_path)]
    assert happened == [("synced", each) for each in above]
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    happened.clear()
    make_folder(path)
    assert happened == []
    assert stat.S_IMODE(path.stat().st_mode) == 0o700

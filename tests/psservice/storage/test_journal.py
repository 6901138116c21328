"""The journal: what was appended is read back, and what was not is not."""

import contextlib
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psservice.storage.environment import MACHINE
from psservice.storage.files import DISK, StorageError
from psservice.storage.journal import Journal, SegmentReader, segment_numbers, segment_path
from psservice.storage.journal_format import HEAD_BYTES, Body, DamagedError
from psservice.storage.lock_file import LockFile
from tests.tiers import examples

many = settings(deadline=None, max_examples=examples(60))
bodies = st.lists(st.tuples(st.integers(0, 9), st.lists(st.binary(max_size=200), max_size=3)), max_size=12)


def body(*parts):
    return Body().with_parts(*parts)


def write(directory: Path, records, fsync="never"):
    journal = Journal(MACHINE, directory, 1, fsync, 0.01)
    for kind, parts in records:
        journal.append(kind, body(*parts))
        journal.wait()
    journal.close()
    return segment_path(directory, 1)


def read(path: Path):
    segment = SegmentReader(path)
    return [(record.kind, record.body) for record in segment.records()], segment.torn


@pytest.mark.parametrize("fsync", ["always", "interval", "never"])
@given(records=bodies)
@settings(deadline=None, max_examples=examples(15))
def test_what_was_appended_is_read_back_in_order(fsync, records, tmp_path_factory):
    path = write(tmp_path_factory.mktemp("journal"), records, fsync)
    assert read(path) == ([(kind, b"".join(parts)) for kind, parts in records], None)


@given(records=bodies, data=st.data())
@many
def test_a_file_cut_anywhere_gives_the_whole_records_before_the_cut(records, data, tmp_path_factory):
    path = write(tmp_path_factory.mktemp("journal"), records)
    whole = path.read_bytes()
    ends = [record.end for record in SegmentReader(path).records()]
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    found, torn = read(path)
    assert len(found) == sum(end <= cut for end in ends)
    assert (torn is None) == (cut in [HEAD_BYTES, *ends])


@given(
    records=st.lists(st.tuples(st.integers(0, 9), st.lists(st.binary(max_size=50), max_size=2)), min_size=2),
    data=st.data(),
)
@many
def test_a_changed_byte_is_a_torn_tail_in_the_last_record_and_damage_before_it(records, data, tmp_path_factory):
    path = write(tmp_path_factory.mktemp("journal"), records)
    whole = bytearray(path.read_bytes())
    last = list(SegmentReader(path).records())[-1].offset
    place = data.draw(st.integers(HEAD_BYTES, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    segment = SegmentReader(path)
    if place >= last:
        assert len(list(segment.records())) == len(records) - 1
        assert segment.torn
    else:
        with pytest.raises(DamagedError, match="is damaged at byte") as raised:
            list(segment.records())
        assert raised.value.path == path
        assert raised.value.offset <= place


def test_zeros_behind_the_end_are_a_torn_tail(tmp_path):
    path = write(tmp_path, [(1, [b"one"]), (2, [b"two"])])
    with path.open("ab") as file:
        file.write(bytes(10_000))
    found, torn = read(path)
    assert [kind for kind, _ in found] == [1, 2]
    assert torn


def test_a_length_beyond_the_file_allocates_nothing(tmp_path):
    path = write(tmp_path, [(1, [b"one"])])
    data = bytearray(path.read_bytes())
    data[HEAD_BYTES + 8 : HEAD_BYTES + 16] = (1 << 60).to_bytes(8, "little")
    path.write_bytes(data)
    found, torn = read(path)
    assert not found
    assert "cut by the end" in torn


def test_segments_follow_one_another_and_are_cut_behind_a_snapshot(tmp_path):
    journal = Journal(MACHINE, tmp_path, 7, "interval", 60.0)
    journal.append(1, body(b"a"))
    assert journal.rotate() == 8
    journal.append(1, body(b"b"))
    assert journal.rotate() == 9
    assert segment_numbers(DISK, tmp_path) == [7, 8, 9]
    assert read(segment_path(tmp_path, 8)) == ([(1, b"b")], None)
    journal.cut_before(9)
    journal.close()
    assert segment_numbers(DISK, tmp_path) == [9]


class FullDisk:
    """Stands for ``os.writev`` on a disk that takes so many bytes more."""

    def __init__(self, room: int) -> None:
        self.room, self.writev = room, os.writev

    def __call__(self, descriptor, views):
        data = b"".join(views)[: self.room]
        if not data:
            raise OSError(28, "No space left on device")
        self.room -= len(data)
        return self.writev(descriptor, [data])


@given(room=st.integers(0, 100))
@many
def test_a_full_disk_refuses_the_record_and_takes_the_next_when_there_is_room(room, tmp_path_factory):
    directory = tmp_path_factory.mktemp("journal")
    said = []
    journal = Journal(MACHINE, directory, 1, "never", 1.0, lambda: said.append(journal.healthy))
    journal.append(1, body(b"before"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "writev", FullDisk(room))
        with pytest.raises(StorageError, match="free space"):
            journal.append(2, body(bytes(200)))
    assert not journal.broken
    assert said == [False]
    journal.append(3, body(b"after"))
    assert said == [False, True]
    journal.close()
    assert read(segment_path(directory, 1)) == ([(1, b"before"), (3, b"after")], None)


def test_after_a_failed_fsync_nothing_is_acknowledged_any_more(tmp_path, monkeypatch):
    journal = Journal(MACHINE, tmp_path, 1, "always", 1.0)

    monkeypatch.setattr(os, "fdatasync", failing_sync)
    journal.append(1, body(b"x"))
    assert not journal.broken
    with pytest.raises(StorageError, match="restart"):
        journal.wait()
    assert journal.broken
    with pytest.raises(StorageError, match="restart"):
        journal.append(2, body(b"y"))
    journal.close()


def failing_sync(descriptor):
    raise OSError(5, "Input/output error")


class Listener:
    """Notes each change of health, and whether another thread can use the journal meanwhile."""

    journal: Journal

    def __init__(self) -> None:
        self.healthy, self.was_free = [], []

    def __call__(self, *_) -> None:
        self.healthy.append(self.journal.healthy)
        other = threading.Thread(target=self._use, daemon=True)
        other.start()
        other.join(10)
        self.was_free.append(not other.is_alive())

    def _use(self) -> None:
        for use in (lambda: self.journal.append(3, body(b"meanwhile")), self.journal.force):
            with contextlib.suppress(StorageError):
                use()


@pytest.mark.parametrize("use", ["wait", "rotate", "close", "interval"])
def test_whoever_is_told_of_a_failed_fsync_finds_the_journal_free(tmp_path, monkeypatch, use):
    listener = Listener()
    journal = listener.journal = Journal(
        MACHINE, tmp_path, 1, "interval" if use == "interval" else "always", 0.01, listener
    )
    journal.append(1, body(b"x"))
    monkeypatch.setattr(os, "fdatasync", failing_sync)
    if use == "interval":
        journal.append(1, body(b"y"))
        end = time.monotonic() + 30
        while not listener.was_free and time.monotonic() < end:
            time.sleep(0.01)
    else:
        with contextlib.suppress(StorageError):
            getattr(journal, use)()
    if use != "close":
        journal.close()
    assert (listener.healthy, listener.was_free) == ([False], [True])


def test_whoever_is_told_of_a_full_disk_and_of_its_end_finds_the_journal_free(tmp_path):
    listener = Listener()
    journal = listener.journal = Journal(MACHINE, tmp_path, 1, "never", 1.0, listener)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "writev", FullDisk(0))
        with pytest.raises(StorageError, match="free space"):
            journal.append(2, body(b"refused"))
    journal.append(3, body(b"after"))
    journal.close()
    assert (listener.healthy, listener.was_free) == ([False, True], [True, True])


def test_one_fsync_serves_all_that_wait(tmp_path, monkeypatch):
    journal = Journal(MACHINE, tmp_path, 1, "always", 1.0)
    calls, entered, go = [], threading.Event(), threading.Event()

    def slow(descriptor):
        calls.append(descriptor)
        entered.set()
        assert go.wait(30)

    monkeypatch.setattr(os, "fdatasync", slow)
    journal.append(1, body(b"first"))
    waiting = [threading.Thread(target=journal.wait)]
    waiting[0].start()
    assert entered.wait(30)
    for _ in range(20):
        journal.append(1, body(b"more"))
    waiting += [threading.Thread(target=journal.wait) for _ in range(20)]
    for thread in waiting[1:]:
        thread.start()
    go.set()
    for thread in waiting:
        thread.join(30)
        assert not thread.is_alive()
    assert len(calls) == 2
    journal.close()


def test_a_directory_is_locked_against_a_second_server(tmp_path):
    held = LockFile(tmp_path / "data", DISK)
    with pytest.raises(StorageError, match="in use by another server"):
        LockFile(tmp_path / "data", DISK)
    held.close()
    LockFile(tmp_path / "data", DISK).close()

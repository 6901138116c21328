"""The file system that forgets, as processes see it: what they synced is there behind a cut, and a writer dies with it.

And what users keep: files that have their name have all that belongs to them.
"""

import fcntl
import mmap
import os
import subprocess
import sys

import pytest
import torch

from psclient.reader.directory_sink import DirectorySink
from pscore import files
from pscore.model import modelfile
from tests.psclient.reader.sink_makers import (
    LAYOUT,
    buffers_of,
    changed,
    cut_of,
    staged_difference,
    staged_whole,
    values_of,
)
from verify.forgetful import filesystem
from verify.forgetful.disk import ForgetfulDisk

pytestmark = pytest.mark.skipif(bool(filesystem.why_not()), reason=f"no file system: {filesystem.why_not()}")

_MOST_CHANGES = 100
_SECONDS = 20.0


@pytest.fixture
def disk(tmp_path):
    with ForgetfulDisk(tmp_path / "disk", seed=0) as mounted:
        yield mounted


def keep(path, data):
    path.write_bytes(data)
    files.sync(path)
    files.sync(path.parent)


def test_what_is_synced_stays_and_what_is_not_may_go(disk):
    keep(disk.path / "kept", b"k" * 10_000)
    number = (disk.path / "kept").stat().st_ino
    left = set()
    for _ in range(30):
        (disk.path / "forgotten").write_bytes(b"f" * 10_000)
        disk.cut()
        with pytest.raises(OSError, match="Input/output error"):
            os.listdir(disk.path)
        disk.come_back("any")
        assert (disk.path / "kept").read_bytes() == b"k" * 10_000
        assert (disk.path / "kept").stat().st_ino == number
        left.add("forgotten" in os.listdir(disk.path))
        (disk.path / "forgotten").unlink(missing_ok=True)
        files.sync(disk.path)
    assert left == {True, False}


def test_files_are_appended_to_cut_off_locked_and_mapped_as_anywhere(disk):
    path = disk.path / "f"
    with path.open("xb", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with path.open("ab", buffering=0) as other:
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            other.write(b"x" * 9000)
        os.ftruncate(file.fileno(), 8000)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[:] == b"x" * 8000
    (disk.path / "d").mkdir()
    path.rename(disk.path / "d" / "g")
    assert [os.listdir(disk.path), os.listdir(disk.path / "d")] == [["d"], ["g"]]


def test_a_writer_dies_at_the_change_at_which_the_power_is_cut_and_sees_no_error(disk):
    words = (
        "import sys\nfor n in range(100):\n    print(n, flush=True)\n    open(sys.argv[1], 'ab', 0).write(b'x' * 10)\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", f"input()\n{words}", str(disk.path / "f")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    disk.arm(writer.pid, 4)  # create, and four writes; the fourth of them is the change
    said, _ = writer.communicate("\n", timeout=_SECONDS)
    assert writer.returncode == -9
    assert said.split() == ["0", "1", "2", "3"]
    assert disk.await_cut(_SECONDS).at_what == "write /f"
    disk.come_back("journaled")


def cut_at_each_change(disk, begin, change, look):
    """Cut at each change of the disk in turn while something is replaced; ``look`` says which of both is there."""
    for after in range(_MOST_CHANGES):
        folder = disk.path / str(after)
        folder.mkdir()
        begin(folder)
        disk.arm(0, after)
        is_done = True
        try:
            change(folder)
        except OSError:
            is_done = False
        is_cut = disk.disarm() is not None
        assert is_done or is_cut
        if not is_cut:
            disk.cut()  # everything is done: it must survive any cut
        disk.come_back("any")
        assert look(folder) in ((2,) if is_done else (1, 2))
        if not is_cut:
            assert after > 2
            return
    raise AssertionError("it never ended")


def test_a_model_file_is_the_earlier_or_the_new_one_at_whatever_change_the_power_is_cut(disk):
    def write(folder, number):
        modelfile.write(folder / "m.safetensors", {"w": torch.full((3000,), float(number))}, {"format": "pt"})

    def begin(folder):
        files.sync(folder.parent)
        write(folder, 1)

    def look(folder):
        modelfile.verify(folder / "m.safetensors")
        return int(modelfile.read(folder / "m.safetensors")["w"][0])

    cut_at_each_change(disk, begin, lambda folder: write(folder, 2), look)


def test_a_folder_that_was_made_for_a_file_survives_with_it(disk):
    for number in range(10):
        folder = disk.path / str(number) / "new" / "folder"
        files.make_folder(folder)
        modelfile.write(folder / "m.safetensors", {"w": torch.arange(9.0)}, {"format": "pt"})
        disk.cut()
        disk.come_back("any")
        modelfile.verify(folder / "m.safetensors")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["whole", "difference"])
def test_a_directory_that_follows_has_one_whole_version_at_whatever_change_the_power_is_cut(disk, kind):
    before, after = values_of(1), changed(values_of(1), 2)

    def put(sink, staged):
        sink.stage(staged)
        sink.commit()

    def begin(folder):
        files.sync(folder.parent)
        sink = DirectorySink(folder)
        sink.open(LAYOUT)
        put(sink, staged_whole(1, before, buffers_of(1)))
        sink.close()

    def change(folder):
        sink = DirectorySink(folder)
        try:
            sink.open(LAYOUT)
            if kind == "whole":
                put(sink, staged_whole(2, after, buffers_of(2)))
            else:
                put(sink, staged_difference(sink, 2, before, after, buffers_of(2)))
        finally:
            sink.close()

    def look(folder):
        sink = DirectorySink(folder)
        held = sink.open(LAYOUT)
        sink.close()
        assert held is not None
        assert held == cut_of(held.version, before if held.version == 1 else after, held.version)
        return held.version

    cut_at_each_change(disk, begin, change, look)

"""A directory that is removed, and a power cut meanwhile."""

from pathlib import Path
from random import Random

import pytest

from psservice.storage.files import discard
from tests.psservice.durability.memory_disk import Crash, MemoryDisk

_CALLS = 12
_FILES = ["manifest.json", "state.safetensors"]
_ABOVE = Path("/snapshots")


@pytest.mark.parametrize("calls", range(_CALLS))
def test_it_has_its_name_with_all_of_its_files_or_no_name(calls):
    for seed in range(40):
        disk = MemoryDisk(Random(seed))
        directory = _ABOVE / "000000000001-v1"
        disk.make_directory(directory)
        for name in _FILES:
            disk.write(directory / name, b"whole")
            disk.sync(directory / name)
        for each in (directory, _ABOVE, Path("/")):
            disk.sync(each)
        disk.fuse = calls
        try:
            discard(disk, directory)
        except Crash:
            assert calls < _CALLS - 1
        disk.restart(power_cut=True)
        if directory.name in disk.list(_ABOVE):
            assert disk.list(directory) == _FILES

"""A directory that follows has one whole version under its index at any moment, whatever fails."""

import json
import os
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from psclient.errors import ConfigurationError
from psclient.reader import directory_sink
from psclient.reader.directory_sink import INDEX, DirectorySink
from pscore.model import modelfile
from pscore.model.layout import ModelLayout
from tests.psclient.reader.sink_makers import (
    LAYOUT,
    buffers_of,
    changed,
    cut_of,
    read_all,
    staged_difference,
    staged_whole,
    values_of,
)
from tests.tiers import examples


@pytest.fixture(autouse=True)
def several_files(monkeypatch):
    monkeypatch.setattr(directory_sink, "_LARGEST_BYTES", 100)


def load(path):
    """Read a directory as another program does, by its index; returns flat parameters and buffers."""
    index = json.loads((path / INDEX).read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(path / file, "pt") as opened:
            found[name] = opened.get_tensor(name)
    flat = torch.cat([found[spec.name].float().reshape(-1) for spec in LAYOUT.parameters])
    for spec in LAYOUT.parameters:
        assert (found[spec.name].dtype, tuple(found[spec.name].shape)) == (spec.dtype, spec.shape)
    return flat, [found[spec.name] for spec in LAYOUT.buffers if spec.name in found], index["metadata"]["sparseps"]


def put(sink, staged):
    sink.stage(staged)
    sink.commit()


def opened(path):
    sink = DirectorySink(path)
    return sink, sink.open(LAYOUT)


@given(st.lists(st.sampled_from(["whole", "some", "none", "again"]), min_size=1, max_size=8), st.integers(0, 1000))
@settings(deadline=None, max_examples=examples(20))
def test_it_has_each_version_and_goes_on_after_a_restart(tmp_path_factory, events, seed):
    path = tmp_path_factory.mktemp("followed") / "new" / "folder"
    sink, held = opened(path)
    assert held is None
    values = values_of(seed)
    put(sink, staged_whole(1, values, buffers_of(1)))
    buffers = 1
    for version, event in enumerate(events, start=2):
        if event == "again":
            sink.close()
            sink, held = opened(path)
            assert held == cut_of(held.version, values, buffers)
            assert held.version < version
            continue
        after = (
            values_of(seed + version) if event == "whole" else changed(values, version, 0.3 if event == "some" else 0.0)
        )
        if event == "whole":
            put(sink, staged_whole(version, after, kept=buffers))
        else:
            put(sink, staged_difference(sink, version, values, after, buffers_of(version)))
            buffers = version
        values = after
        found, kept, about = load(path)
        assert torch.equal(found, values)
        assert torch.equal(read_all(sink), values)
        assert int(kept[1]) == buffers
        assert about["version"] == version
        assert about["digest"] == cut_of(version, values).digest
    names = {name for name in os.listdir(path) if name.endswith(".safetensors")}
    assert len(names) <= 2 * (len(sink._groups) + 1)  # this version, and the one before
    sink.close()


def test_the_files_of_the_version_before_stay_for_their_readers(tmp_path):
    sink, _ = opened(tmp_path)
    values = values_of(1)
    put(sink, staged_whole(1, values))
    index = json.loads((tmp_path / INDEX).read_text())
    after = changed(values, 2, 1.0)
    put(sink, staged_difference(sink, 2, values, after))
    assert all((tmp_path / file).exists() for file in index["weight_map"].values())
    put(sink, staged_difference(sink, 3, after, values))
    assert not any((tmp_path / file).exists() for file in index["weight_map"].values())


class _Crashed(BaseException):
    pass


def crashing(monkeypatch, at):
    """Let the process die, as far as files show it, before the operation of this number; count operations."""
    count = [0]

    def wrap(module, name):
        real = getattr(module, name)

        def call(*arguments, **options):
            count[0] += 1
            if count[0] > at:
                raise _Crashed
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    wrap(os, "replace")
    wrap(shutil, "copyfile")
    wrap(modelfile, "save")
    wrap(os, "fsync")
    return count


@pytest.mark.parametrize("kind", ["whole", "difference"])
def test_a_crash_at_any_file_operation_leaves_the_old_or_the_new_version(tmp_path, monkeypatch, kind):
    before, after = values_of(1), changed(values_of(1), 2)
    for at in range(100):
        path = tmp_path / str(at)
        sink, _ = opened(path)
        put(sink, staged_whole(1, before, buffers_of(1)))
        staged = (
            staged_whole(2, after, buffers_of(2))
            if kind == "whole"
            else staged_difference(sink, 2, before, after, buffers_of(2))
        )
        is_done = True
        with monkeypatch.context() as patch:
            crashing(patch, at)
            try:
                put(sink, staged)
            except _Crashed:
                is_done = False
        found, buffers, about = load(path)
        version = about["version"]
        assert version in ((2,) if is_done else (1, 2))
        assert torch.equal(found, before if version == 1 else after)
        assert int(buffers[1]) == version
        sink.close()
        again, held = opened(path)  # as a follower that is started again
        assert held == cut_of(version, found, version)
        put(again, staged_difference(again, 3, found, values_of(3), buffers_of(3)))
        assert torch.equal(load(path)[0], values_of(3))
        again.close()
        if is_done:
            assert at > 5
            return
    raise AssertionError("it never ended")


@pytest.mark.parametrize("failure", ["copyfile", "save", "fsync", "replace"])
def test_a_disk_that_refuses_leaves_the_version_before(tmp_path, monkeypatch, failure):
    sink, _ = opened(tmp_path)
    before, after = values_of(1), changed(values_of(1), 2)
    put(sink, staged_whole(1, before, buffers_of(1)))
    names = sorted(os.listdir(tmp_path))

    def refuse(*arguments, **options):
        raise OSError(28, "No space left on device")

    staged = staged_difference(sink, 2, before, after, buffers_of(2))
    module = {"copyfile": shutil, "replace": os, "fsync": os}.get(failure, modelfile)
    with monkeypatch.context() as patch:
        patch.setattr(module, failure, refuse)
        with pytest.raises(OSError, match="No space"):
            sink.stage(staged)
    sink.abort()
    assert sorted(os.listdir(tmp_path)) == names
    assert torch.equal(load(tmp_path)[0], before)
    put(sink, staged)
    assert torch.equal(load(tmp_path)[0], after)


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "buffers", "no buffers", "no files", "no digest"])
def test_what_is_not_as_it_was_written_counts_for_nothing(tmp_path, damage):
    sink, _ = opened(tmp_path)
    put(sink, staged_whole(1, values_of(1), buffers_of(1)))
    sink.close()
    index = json.loads((tmp_path / INDEX).read_text())
    file = tmp_path / index["weight_map"]["b.weight"]
    if damage == "flipped":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "gone":
        file.unlink()
    elif damage == "buffers":
        data = bytearray((tmp_path / index["weight_map"]["mean"]).read_bytes())
        data[-1] ^= 1
        (tmp_path / index["weight_map"]["mean"]).write_bytes(data)
    elif damage == "no buffers":
        (tmp_path / index["weight_map"]["mean"]).unlink()
    elif damage == "no files":
        index["metadata"]["sparseps"]["files"] = []
        (tmp_path / INDEX).write_text(json.dumps(index))
    else:
        index["metadata"]["sparseps"]["shards"][0][2] = "00"
        (tmp_path / INDEX).write_text(json.dumps(index))
    sink = DirectorySink(tmp_path)
    assert sink.open(LAYOUT) is None
    put(sink, staged_whole(2, values_of(2), buffers_of(2)))
    assert torch.equal(load(tmp_path)[0], values_of(2))


def test_a_directory_of_another_model_is_refused(tmp_path):
    sink, _ = opened(tmp_path)
    put(sink, staged_whole(1, values_of(1)))
    sink.close()
    with pytest.raises(ConfigurationError, match="version 1 of run run, of another model"):
        DirectorySink(tmp_path).open(ModelLayout(LAYOUT.parameters[:2]))
    assert torch.equal(load(tmp_path)[0], values_of(1))


def test_a_directory_that_is_removed_is_made_again(tmp_path):
    sink, _ = opened(tmp_path / "m")
    put(sink, staged_whole(1, values_of(1)))
    shutil.rmtree(tmp_path / "m")
    with pytest.raises(OSError, match="No such file"):
        read_all(sink)
    assert sink.open(LAYOUT) is None
    put(sink, staged_whole(2, values_of(2)))
    assert torch.equal(load(tmp_path / "m")[0], values_of(2))
    with pytest.raises(ConfigurationError, match="another follower"):
        DirectorySink(tmp_path / "m")


def test_a_version_that_is_damaged_stays_until_there_is_another(tmp_path, monkeypatch):
    """Others may read its undamaged files."""
    sink, _ = opened(tmp_path)
    put(sink, staged_whole(1, values_of(1), buffers_of(1)))
    sink.close()
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / index["weight_map"]["c"]).write_bytes(b"")
    sink = DirectorySink(tmp_path)
    assert sink.open(LAYOUT) is None
    with monkeypatch.context() as patch:
        patch.setattr(modelfile, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            sink.stage(staged_whole(2, values_of(2)))
    sink.abort()
    assert all((tmp_path / file).exists() for file in index["weight_map"].values())


def test_files_outside_the_directory_are_never_read(tmp_path):
    sink, _ = opened(tmp_path / "followed")
    put(sink, staged_whole(1, values_of(1)))
    sink.close()
    index = json.loads((tmp_path / "followed" / INDEX).read_text())
    name = index["metadata"]["sparseps"]["files"][0]
    shutil.copy(tmp_path / "followed" / name, tmp_path / name)
    index["metadata"]["sparseps"]["files"][0] = f"../{name}"
    (tmp_path / "followed" / INDEX).write_text(json.dumps(index))
    assert opened(tmp_path / "followed")[1] is None
    assert (tmp_path / name).exists()


@pytest.mark.parametrize("foreign", ["model.safetensors", INDEX, "broken index"])
def test_the_model_of_another_program_is_left_alone(tmp_path, foreign):
    name = INDEX if foreign == "broken index" else foreign
    (tmp_path / name).write_text("{" if foreign == "broken index" else json.dumps({"weight_map": {}}))
    with pytest.raises(ConfigurationError, match="another program"):
        DirectorySink(tmp_path).open(LAYOUT)
    assert (tmp_path / name).exists()


def test_two_followers_do_not_share_a_directory(tmp_path):
    sink = DirectorySink(tmp_path)
    with pytest.raises(ConfigurationError, match="another follower"):
        DirectorySink(tmp_path)
    sink.close()
    DirectorySink(tmp_path).close()

"""Model files: whole, in parts, and damaged."""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from pscore.model import modelfile
from pscore.model.layout import ModelLayout, TensorSpec
from tests.pscore.core_makers import layouts
from tests.tiers import examples

LAYOUT = ModelLayout(
    (
        TensorSpec("w", (3, 4), torch.float32),
        TensorSpec("half", (5,), torch.bfloat16),
        TensorSpec("scale", (), torch.float32),
        TensorSpec("odd@1", (2,), torch.float16),
    ),
    (TensorSpec("mean", (4,), torch.float32), TensorSpec("batches", (), torch.int64)),
)
BUFFERS = {"mean": torch.arange(4.0), "batches": torch.tensor(7)}

in_tmp = settings(deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert one[name].shape == other[name].shape, name
        assert torch.equal(one[name], other[name]), name


def write_parts(path, layout, flat, num_shards, buffers=None):
    written = []
    for index, span in enumerate(layout.shard_spans(num_shards)):
        part = modelfile.part_path(path, index, num_shards)
        buffers_here = (buffers or {}) if index == 0 else {}
        modelfile.write_part(part, layout, span, flat[span.start : span.end], buffers_here, {"format": "pt"})
        written.append(part)
    return written


def test_a_whole_file_is_the_state_dict(tmp_path):
    flat = torch.randn(LAYOUT.size)
    state = modelfile.assemble(LAYOUT, flat, BUFFERS.values())
    modelfile.write(tmp_path / "m.safetensors", state, {"format": "pt"})
    same(modelfile.read(tmp_path / "m.safetensors"), state)
    assert [(name, tuple(t.shape), t.dtype) for name, t in state.items()] == [
        (spec.name, spec.shape, spec.dtype) for spec in LAYOUT.tensors()
    ]


def test_a_file_is_on_the_disk_before_it_gets_its_name_and_the_name_before_anybody_is_told(tmp_path, monkeypatch):
    """A power cut then leaves the earlier file or this one, and never a name with nothing behind it."""
    path, happened = tmp_path / "m.safetensors", []
    sync, replace = os.fsync, os.replace

    def synced(descriptor):
        happened.append(("synced", os.fstat(descriptor).st_ino))
        sync(descriptor)

    def renamed(source, target):
        replace(source, target)
        happened.append(("renamed", os.stat(target).st_ino))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    modelfile.write(path, {"w": torch.arange(9.0)}, {"format": "pt"})
    file, folder = path.stat().st_ino, tmp_path.stat().st_ino
    assert happened == [("synced", file), ("renamed", file), ("synced", folder)]


@pytest.mark.parametrize("zeros", [False, True])
def test_values_that_have_changed_under_a_whole_header_are_found(tmp_path, zeros):
    path = tmp_path / "m.safetensors"
    modelfile.write(path, modelfile.assemble(LAYOUT, torch.randn(LAYOUT.size), BUFFERS.values()), {"format": "pt"})
    data = bytearray(path.read_bytes())
    head = 8 + int.from_bytes(data[:8], "little")
    data[head:] = bytes(len(data) - head) if zeros else data[head:-1] + bytes([data[-1] ^ 1])
    path.write_bytes(data)
    for use in (modelfile.read, modelfile.verify):
        with pytest.raises(modelfile.ModelFileError, match="checksum"):
            use(path)


def test_a_file_that_another_library_wrote_has_no_checksum_and_is_read(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.arange(9.0)}, path)
    assert torch.equal(modelfile.read(path)["w"], torch.arange(9.0))
    with pytest.raises(modelfile.ModelFileError, match="checksum"):
        modelfile.verify(path)


@given(layouts(), st.integers(0, 2**16))
@settings(deadline=None, max_examples=examples(50))
def test_flatten_undoes_assemble(layout, seed):
    flat = torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))
    state = modelfile.assemble(layout, flat)
    again = modelfile.assemble(layout, modelfile.flatten(layout, state))
    same(again, state)


@given(layouts(), st.integers(2, 5), st.integers(0, 2**16))
@in_tmp
def test_the_parts_of_all_shards_join_to_the_whole(tmp_path, layout, num_shards, seed):
    flat = torch.randn(layout.size, generator=torch.Generator().manual_seed(seed))
    parts = write_parts(tmp_path / "m.safetensors", layout, flat, num_shards)
    joined, whole = modelfile.read_parts(parts), modelfile.assemble(layout, flat)
    same({name: joined[name].to(whole[name].dtype) for name in joined}, whole)


def test_parts_keep_dtypes_names_and_buffers(tmp_path):
    flat = torch.randn(LAYOUT.size)
    parts = write_parts(tmp_path / "m.safetensors", LAYOUT, flat, 3, BUFFERS)
    same(modelfile.read_parts(reversed(parts)), modelfile.assemble(LAYOUT, flat, BUFFERS.values()))


def test_parts_are_numbered_and_one_shard_writes_the_whole_name(tmp_path):
    path = tmp_path / "m.safetensors"
    assert modelfile.part_path(path, 0, 1) == path
    assert modelfile.part_path(path, 1, 3).name == "m-00002-of-00003.safetensors"


def test_a_missing_part_is_named_by_a_parameter_that_lacks_elements(tmp_path):
    parts = write_parts(tmp_path / "m.safetensors", LAYOUT, torch.randn(LAYOUT.size), 2)
    for lacking in ([parts[0]], [parts[1]]):
        with pytest.raises(modelfile.ModelFileError, match="elements found"):
            modelfile.read_parts(lacking)


def test_a_part_is_not_taken_for_a_whole_nor_a_whole_for_a_part(tmp_path):
    parts = write_parts(tmp_path / "m.safetensors", LAYOUT, torch.randn(LAYOUT.size), 2)
    with pytest.raises(modelfile.ModelFileError, match="psclient merge") as error:
        modelfile.read(parts[0])
    assert str(parts[0]) in str(error.value)
    whole = tmp_path / "whole.safetensors"
    modelfile.write(whole, {"w": torch.zeros(2)}, {})
    with pytest.raises(modelfile.ModelFileError, match="not a part"):
        modelfile.read_parts([whole])


def damaged(path, how):
    if how == "directory":
        path.mkdir()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "noise":
        path.write_bytes(bytes(range(256)) * 4)
    elif how == "cut":
        modelfile.write(path, {"w": torch.zeros(1000)}, {})
        path.write_bytes(path.read_bytes()[:-100])
    return path


@pytest.mark.parametrize(
    "read", [modelfile.read, lambda path: modelfile.read_parts([path])], ids=["as whole", "as part"]
)
@pytest.mark.parametrize("how", ["missing", "directory", "empty", "noise", "cut"])
def test_a_bad_file_is_named(tmp_path, how, read):
    path = damaged(tmp_path / "bad.safetensors", how)
    with pytest.raises(modelfile.ModelFileError, match=r"bad\.safetensors"):
        read(path)


def test_a_model_that_does_not_fit_is_named_by_tensor():
    state = modelfile.assemble(LAYOUT, torch.zeros(LAYOUT.size))
    with pytest.raises(modelfile.ModelFileError, match="half"):
        modelfile.flatten(LAYOUT, {name: t for name, t in state.items() if name != "half"})
    with pytest.raises(modelfile.ModelFileError, match=r"w \[3, 4\].*\[4, 3\]"):
        modelfile.flatten(LAYOUT, state | {"w": torch.zeros(4, 3)})


def test_tied_weights_are_found_by_their_other_name():
    layout = ModelLayout((TensorSpec("a", (2,), torch.float32, ("b", "c")),))
    assert modelfile.flatten(layout, {"c": torch.tensor([1.0, 2.0])}).tolist() == [1, 2]


@pytest.mark.parametrize("name", ["m.pt", "m.PTH", "m.bin", "m.ckpt", "no/folder/m.safetensors", "s3://bucket/m"])
def test_no_model_is_written_as_a_pickle_or_into_a_folder_that_is_not_there(tmp_path, name):
    with pytest.raises(modelfile.ModelFileError, match=r"safetensors|folder|URL"):
        modelfile.write(tmp_path / name, {"w": torch.ones(2)}, {})
    assert not [*tmp_path.iterdir()]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "m.safetensors"
    modelfile.write(path, {"w": torch.ones(2)}, {})
    with pytest.raises(TypeError):
        modelfile.write(path, {"w": torch.zeros(2)}, {"not text": 3})
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.safetensors"]
    assert modelfile.read(path)["w"].tolist() == [1, 1]

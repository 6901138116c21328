"""Files that are written piece by piece are those of the safetensors library."""

import pytest
import torch
from safetensors.torch import load_file

from psservice.model.copies import CopyOnWrite
from psservice.storage import tensor_file

TENSORS = {
    "flat": torch.arange(2**20 + 3, dtype=torch.float32),  # of more than one piece
    "bits": torch.tensor([[True, False], [False, True]]),
    "half": torch.randn(3, 5).to(torch.bfloat16),
    "empty": torch.empty(0),
    "counter": torch.tensor(7.0, dtype=torch.float64),
    "offsets": torch.arange(9, dtype=torch.int32),
}


def test_the_library_reads_what_is_written(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        tensor_file.write(file, CopyOnWrite().open_all(TENSORS))
    found = load_file(tmp_path / "file")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


def test_a_data_type_that_has_no_name_is_refused(tmp_path):
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match=r"odd is of torch\.complex64"):
        tensor_file.write(file, CopyOnWrite().open_all({"odd": torch.ones(2, dtype=torch.complex64)}))

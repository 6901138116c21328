"""Buffers as one byte string: every dtype, end to end, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.buffers import is_exchanged, pack, packed_bytes, unpack
from pscore.model.layout import BUFFER_DTYPES, TensorSpec
from tests.tiers import examples


def of_bytes(spec, seed):
    """A tensor of random bytes; booleans are zeros and ones."""
    generator = torch.Generator().manual_seed(seed)
    top = 2 if spec.dtype == torch.bool else 256
    raw = torch.randint(0, top, (spec.nbytes,), generator=generator, dtype=torch.uint8)
    return raw.view(spec.dtype).reshape(spec.shape)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=3).map(tuple), st.sampled_from(BUFFER_DTYPES)), max_size=6),
    st.integers(0, 2**16),
)
@settings(deadline=None, max_examples=examples(80))
def test_every_buffer_comes_back_bit_for_bit(kinds, seed):
    specs = [TensorSpec(f"b{i}", shape, dtype) for i, (shape, dtype) in enumerate(kinds)]
    tensors = [of_bytes(spec, seed + i) for i, spec in enumerate(specs)]
    data = pack(tensors)
    assert len(data) == packed_bytes(specs)
    back = unpack(data, specs)
    assert [(tuple(t.shape), t.dtype) for t in back] == [(spec.shape, spec.dtype) for spec in specs]
    assert pack(back) == data


def test_strided_buffers_are_packed_in_logical_order():
    matrix = torch.arange(6.0).reshape(2, 3)
    assert pack([matrix.t()]) == pack([matrix.t().contiguous()])
    assert pack([matrix[:, 1]]) == pack([torch.tensor([1.0, 4.0])])


def test_unpacked_buffers_own_their_memory():
    first = unpack(pack([torch.zeros(3)]), [TensorSpec("b", (3,), torch.float32)])[0]
    first.add_(1)
    assert first.tolist() == [1, 1, 1]


@pytest.mark.parametrize("length", [0, 11, 13])
def test_a_wrong_length_is_an_error(length):
    with pytest.raises(ValueError, match="12"):
        unpack(bytes(length), [TensorSpec("b", (3,), torch.float32)])


@pytest.mark.parametrize(
    ("shape", "dtype", "exchanged"),
    [
        ((3,), torch.float32, True),
        ((3,), torch.float16, True),
        ((), torch.float64, True),
        ((), torch.int64, True),
        ((), torch.uint8, True),
        ((), torch.bool, False),
        ((3,), torch.int64, False),
        ((1,), torch.int64, False),
        ((3,), torch.bool, False),
    ],
)
def test_statistics_and_counters_are_exchanged_and_tables_are_not(shape, dtype, exchanged):
    assert is_exchanged(TensorSpec("b", shape, dtype)) is exchanged

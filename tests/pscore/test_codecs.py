"""Codecs: every one gives back what it was given, and the shortest is taken."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore import codecs
from pscore.reasons import Reason, Refusal
from pscore.v1 import parameter_server_pb2 as pb

many = settings(deadline=None, max_examples=100)

# Gaps around both escapes, small and huge ones; the last offset stays below 2³².
gap_lists = st.lists(
    st.sampled_from([0, 1, 2, 254, 255, 256, 65534, 65535, 65536, 1 << 24]) | st.integers(0, 300), max_size=60
)


def offsets_of(gaps):
    return np.cumsum(np.array(gaps, dtype=np.int64) + 1) - 1


@pytest.mark.parametrize("codec", sorted(codecs.INDEX_FORMATS), ids=pb.IndexCodec.Name)
@given(gap_lists)
@many
def test_indices_come_back(codec, gaps):
    offsets, index_format = offsets_of(gaps), codecs.INDEX_FORMATS[codec]
    data = index_format.encode(np.array(gaps, dtype=np.int64))
    assert len(data) == index_format.size(np.array(gaps, dtype=np.int64))
    length = int(offsets[-1]) + 1 if gaps else 0
    assert codecs.decode_offsets(codec, data, len(gaps), length).tolist() == offsets.tolist()


@pytest.mark.parametrize("codec", sorted(codecs.INDEX_FORMATS), ids=pb.IndexCodec.Name)
@pytest.mark.parametrize("offset", [0, 1, 254, 255, 65534, 65535, 2**31 - 1, 2**31, 2**32 - 1])
def test_the_largest_offsets_come_back(codec, offset):
    data = codecs.INDEX_FORMATS[codec].encode(np.array([offset]))
    assert codecs.decode_offsets(codec, data, 1, offset + 1).tolist() == [offset]


@given(gap_lists)
@many
def test_the_shortest_index_codec_is_chosen(gaps):
    codec, data = codecs.encode_offsets(offsets_of(gaps))
    every = [index_format.encode(np.array(gaps, dtype=np.int64)) for index_format in codecs.INDEX_FORMATS.values()]
    assert len(data) == min(map(len, every))
    length = sum(gaps) + len(gaps)
    assert codecs.decode_offsets(codec, data, len(gaps), length).tolist() == offsets_of(gaps).tolist()


def test_indices_need_one_byte_where_gaps_are_short_and_never_above_four():
    assert len(codecs.encode_offsets(np.arange(0, 1000, 100))[1]) == 10
    assert len(codecs.encode_offsets(np.arange(0, 10**9, 10**8))[1]) == 40


@pytest.mark.parametrize("dtype", codecs.VALUE_CODECS, ids=str)
@given(st.integers(0, 2**32 - 1), st.integers(0, 50))
@many
def test_values_come_back_bit_for_bit(dtype, seed, count):
    generator = torch.Generator().manual_seed(seed)
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    limits = torch.iinfo(whole)
    values = torch.randint(limits.min, limits.max, (count,), generator=generator, dtype=whole).view(dtype)
    values = values[values.isfinite()]
    codec, data = codecs.encode_values(values)
    back = codecs.decode_values(codec, data, values.numel())
    assert back.dtype == torch.float32
    assert torch.equal(back.to(dtype).view(whole), values.view(whole))


def test_values_need_their_own_width():
    for dtype in codecs.VALUE_CODECS:
        assert len(codecs.encode_values(torch.ones(7, dtype=dtype))[1]) == 7 * dtype.itemsize


def test_strided_values_are_written_in_order():
    codec, data = codecs.encode_values(torch.arange(10.0)[::3])
    assert codecs.decode_values(codec, data, 4).tolist() == [0, 3, 6, 9]


def test_every_codec_of_the_protocol_is_registered():
    assert {*codecs.INDEX_FORMATS, pb.INDEX_CODEC_DENSE} == {*pb.IndexCodec.values()} - {pb.INDEX_CODEC_UNSPECIFIED}
    assert {*codecs.VALUE_DTYPES} == {*pb.ValueCodec.values()} - {pb.VALUE_CODEC_UNSPECIFIED}
    assert {dtype: codec for codec, dtype in codecs.VALUE_DTYPES.items()} == codecs.VALUE_CODECS


@pytest.mark.parametrize("codec", [pb.INDEX_CODEC_UNSPECIFIED, 77])
def test_an_unknown_codec_is_refused(codec):
    for decode in (lambda: codecs.decode_offsets(codec, b"", 0, 0), lambda: codecs.decode_values(codec, b"", 0)):
        with pytest.raises(Refusal) as refused:
            decode()
        assert refused.value.reason is Reason.UNKNOWN_CODEC

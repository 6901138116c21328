"""Codecs of the words of feeds: any bits come back, and nothing is read as what it is not."""

import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import WORDS, Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire import frames
from pscore.wire.codecs.format import MAX_ENTRIES
from pscore.wire.codecs.values import CODEC_OF_DTYPE, VALUE_FORMATS, WORD_FORMATS, decode_values
from pscore.wire.dense import DenseReader, dense_chunk
from pscore.wire.errors import ErrorCode
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.psservice.shard_makers import reason_of
from tests.tiers import examples

many = settings(deadline=None, max_examples=examples(100))
each_word = pytest.mark.parametrize("dtype", WORDS.values(), ids=str)
WITHIN = Span(100, 400)


def words_of(dtype, octets):
    """Words of these bits, as many as are whole."""
    return torch.frombuffer(bytearray(octets), dtype=dtype, count=len(octets) // dtype.itemsize)


def chunk_of(codec, values, count=3):
    return pb.Chunk(
        start=100,
        length=count,
        count=count,
        index_codec=pb.INDEX_CODEC_DENSE,
        value_codec=codec,
        values=values,
    )


@each_word
@given(octets=st.binary(min_size=4, max_size=600), sparse=st.booleans(), chunk_bytes=st.integers(64, 300))
@many
def test_words_of_any_bits_come_back(dtype, octets, sparse, chunk_bytes):
    words = words_of(dtype, octets)
    span, offsets = Span(100, 100 + words.numel()), None
    if sparse:
        offsets = 3 * torch.arange(words.numel())
        span = Span(100, 100 + 3 * words.numel())
    segment, reader = SparseSlice(span, offsets, words), frames.ChunkReader(span, origin=100, dtype=dtype)
    for chunk, told in frames.encode(segment, chunk_bytes=chunk_bytes):
        assert chunk.value_codec == CODEC_OF_DTYPE[dtype]
        assert len(chunk.values) == chunk.count * dtype.itemsize
        read = reader.read(pb.Chunk.FromString(chunk.SerializeToString()))
        assert read.values.dtype == dtype
        assert torch.equal(read.values, told)
    assert torch.equal(torch.cat([part.values for part in reader.segments]), words)
    if sparse:
        assert torch.equal(torch.cat([part.offsets for part in reader.segments]), offsets)


@each_word
def test_words_that_were_read_have_memory_of_their_own(dtype):
    data = bytearray(range(dtype.itemsize * 3))
    values = decode_values(CODEC_OF_DTYPE[dtype], memoryview(data), 3, dtype)
    before = values.tobytes()
    data[:] = bytes(len(data))
    assert values.tobytes() == before
    values[0] = 7  # and may be written


@pytest.mark.parametrize("codec", WORD_FORMATS)
def test_words_are_refused_where_numbers_are_expected(codec):
    chunk = chunk_of(codec, bytes(WORD_FORMATS[codec].size(3)))
    assert reason_of(frames.decode, chunk, WITHIN) is ErrorCode.UNKNOWN_CODEC
    assert reason_of(DenseReader(WITHIN).read, chunk) is ErrorCode.UNKNOWN_CODEC


@each_word
def test_every_other_codec_is_refused_where_words_are_expected(dtype):
    others = {*pb.ValueCodec.values(), 77} - {CODEC_OF_DTYPE[dtype]}
    assert {*VALUE_FORMATS, pb.VALUE_CODEC_RESIDUE} < others
    for codec in others:
        form = (VALUE_FORMATS | WORD_FORMATS).get(codec)
        chunk = chunk_of(codec, bytes(form.size(3) if form else 12))
        assert reason_of(frames.decode, chunk, WITHIN, dtype=dtype) is ErrorCode.UNKNOWN_CODEC
        assert reason_of(DenseReader(WITHIN, dtype).read, chunk) is ErrorCode.UNKNOWN_CODEC


@each_word
@given(count=st.integers(1, 200), size=st.integers(0, 900))
@many
def test_another_number_of_bytes_is_refused(dtype, count, size):
    chunk = chunk_of(CODEC_OF_DTYPE[dtype], bytes(size), count)
    if size == count * dtype.itemsize:
        assert frames.decode(chunk, WITHIN, dtype=dtype).entries == count
        return
    assert reason_of(frames.decode, chunk, WITHIN, dtype=dtype) is ErrorCode.BAD_CHUNK
    reader = DenseReader(WITHIN, dtype)
    assert reason_of(reader.read, chunk) is ErrorCode.BAD_CHUNK
    assert reader.checksum.commit() == pb.Commit()


@each_word
@pytest.mark.parametrize("count", [1000, MAX_ENTRIES, MAX_ENTRIES + 1, 2**32 - 1])
def test_words_are_counted_before_anything_is_allocated(dtype, count):
    chunk = chunk_of(CODEC_OF_DTYPE[dtype], bytes(64), count)
    tracemalloc.start()
    try:
        assert reason_of(frames.decode, chunk, Span(0, 1 << 40), dtype=dtype) is ErrorCode.BAD_CHUNK
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 << 10


@each_word
@given(data=st.binary(max_size=100), count=st.integers(0, 2**32 - 1) | st.integers(0, 50), codec=st.integers(0, 12))
@many
def test_any_bytes_of_any_codec_are_words_or_refused(dtype, data, count, codec):
    if codec != CODEC_OF_DTYPE[dtype] or count * dtype.itemsize != len(data):
        reason = reason_of(decode_values, codec, data, count, dtype)
        assert reason is (ErrorCode.BAD_CHUNK if codec == CODEC_OF_DTYPE[dtype] else ErrorCode.UNKNOWN_CODEC)
        return
    words = decode_values(codec, data, count, dtype)
    assert words.tobytes() == data
    assert torch.from_numpy(words).dtype == dtype


@each_word
def test_a_dense_chunk_of_words_is_read_to_its_place(dtype):
    reader, words = DenseReader(Span(5, 9), dtype), words_of(dtype, bytes(range(200, 200 + 4 * dtype.itemsize)))
    for first in (0, 2):
        part = words[first : first + 2].numpy().tobytes()
        reader.read(dense_chunk(Span(5 + first, 7 + first), dtype), memoryview(part))
    reader.require_complete()
    assert torch.equal(reader.values, words)

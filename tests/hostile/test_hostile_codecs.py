"""Codec bytes that lie, anything at all; only refusals come out. Single lies, by name, are in corpus/."""

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.wire.codecs.format import MAX_ENTRIES
from pscore.wire.codecs.index import INDEX_FORMATS, decode_offsets
from pscore.wire.codecs.values import VALUE_FORMATS, decode_values
from pscore.wire.errors import Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.tiers import examples

many = settings(deadline=None, max_examples=examples(400))

OFFSETS = np.array([0, 3, 9, 1_000_000])


def offsets_or_refusal(codec, data, count, length):
    """Decode; whatever is taken are offsets."""
    try:
        offsets = decode_offsets(codec, data, count, length)
    except Rejected:
        return
    assert offsets.dtype == np.int64
    assert offsets.size == count
    assert count == 0 or (offsets[0] >= 0 and offsets[-1] < length and bool((np.diff(offsets) > 0).all()))


index_codecs = pytest.mark.parametrize("codec", INDEX_FORMATS, ids=[each.name for each in INDEX_FORMATS.values()])
value_codecs = pytest.mark.parametrize("codec", VALUE_FORMATS, ids=[each.name for each in VALUE_FORMATS.values()])
counts = st.integers(0, 40) | st.integers(0, 2**32 - 1) | st.sampled_from([MAX_ENTRIES, MAX_ENTRIES + 1])
lengths = st.integers(0, 300) | st.integers(0, 2**64 - 1)


@index_codecs
@given(data=st.binary(max_size=100), count=counts, length=lengths)
@many
def test_any_index_bytes_are_taken_or_refused(codec, data, count, length):
    offsets_or_refusal(codec, data, count, length)


@value_codecs
@given(data=st.binary(max_size=100), count=counts, fit=st.booleans())
@many
def test_any_value_bytes_are_taken_or_refused(codec, data, count, fit):
    if fit:  # as long as they should be, so that something is decoded
        count %= 300
        data = (data * 40 + bytes(1300))[: VALUE_FORMATS[codec].size(count)]
    try:
        values = decode_values(codec, data, count)
    except Rejected:
        return
    assert values.dtype == np.float32
    assert values.size == count
    assert np.isfinite(values).all()


@index_codecs
@pytest.mark.parametrize("filler", [b"\0", b"\1", b"\x55", b"\x80", b"\xff"])
@pytest.mark.parametrize("size", [64, 64 << 10])
def test_decoding_takes_memory_and_time_of_the_bytes_and_the_count_only(codec, filler, size):
    decode_offsets(
        codec,
        INDEX_FORMATS[codec].encode(OFFSETS, int(OFFSETS[-1]) + 1),
        OFFSETS.size,
        1 << 20 if codec != pb.INDEX_CODEC_BITMAP else 1_000_001,
    )
    for count in (1, size, 8 * size, MAX_ENTRIES):
        for length in (count, 8 * size, 1 << 32, 1 << 63):
            tracemalloc.start()
            began = time.perf_counter()
            offsets_or_refusal(codec, filler * size, count, length)
            seconds, peak = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert seconds < 5
            most = 200 * size + (1 << 20)
            assert peak <= most, f"{peak} bytes for {size} bytes and {count} entries"


@value_codecs
def test_values_are_counted_before_anything_is_allocated(codec):
    tracemalloc.start()
    for count in (1000, MAX_ENTRIES, 2**32 - 1):
        with pytest.raises(Rejected):
            decode_values(codec, bytes(64), count)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 10

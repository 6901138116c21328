"""Chunks of any fields: each is refused before anything is allocated or applied. Single lies are in corpus/."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import Span
from pscore.wire import frames
from pscore.wire.codecs.index import INDEX_FORMATS
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.tiers import examples

WITHIN = Span(100, 200)
many = settings(deadline=None, max_examples=examples(400))


def good(codec=pb.INDEX_CODEC_RAW32):
    """A chunk that is taken; tests break it in one place."""
    indices, values = INDEX_FORMATS[codec].encode(np.array([0, 3, 9]), 10), struct.pack("<3f", 1, 2, 3)
    codecs = {"index_codec": codec, "value_codec": pb.VALUE_CODEC_FP32}
    return pb.Chunk(start=110, length=10, count=3, indices=indices, values=values, **codecs)


def test_the_unbroken_chunks_are_taken():
    for codec in INDEX_FORMATS:
        assert frames.decode(good(codec), WITHIN).offsets.tolist() == [0, 3, 9]
    dense = pb.Chunk(start=110, length=5, count=5, index_codec=1, value_codec=1, values=bytes(20))
    assert frames.decode(dense, WITHIN).entries == 5


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"start": 99}, ErrorCode.BAD_CHUNK),
        ({"start": 191}, ErrorCode.BAD_CHUNK),
        ({"start": 2**64 - 1}, ErrorCode.BAD_CHUNK),
        ({"count": 0, "indices": b"", "values": b""}, ErrorCode.BAD_CHUNK),
        ({"value_codec": pb.VALUE_CODEC_UNSPECIFIED}, ErrorCode.UNKNOWN_CODEC),
        ({"value_codec": 77}, ErrorCode.UNKNOWN_CODEC),
        ({"index_codec": pb.INDEX_CODEC_UNSPECIFIED}, ErrorCode.UNKNOWN_CODEC),
        ({"index_codec": -5}, ErrorCode.UNKNOWN_CODEC),
    ],
)
def test_what_the_corpus_cannot_say_is_refused_too(fields, reason):
    """A span of a shard that does not begin at 0, an empty chunk, and codecs of no folder."""
    chunk = good()
    for name, value in fields.items():
        setattr(chunk, name, value)
    with pytest.raises(Rejected) as refused:
        frames.decode(chunk, WITHIN)
    assert refused.value.reason is reason


def taken_or_refused(chunk, within=WITHIN):
    """Decode; whatever is taken keeps every promise of a segment."""
    try:
        segment = frames.decode(chunk, within)
    except Rejected:
        return
    assert within.start <= segment.span.start < segment.span.end <= within.end
    assert segment.entries == chunk.count
    assert bool(segment.values.isfinite().all())
    assert segment.values.dtype == torch.float32
    if segment.offsets is None:
        assert segment.entries == segment.span.length
    else:
        offsets = segment.offsets.tolist()
        assert offsets == sorted(set(offsets))
        assert offsets[0] >= 0
        assert offsets[-1] < segment.span.length


unsigned64 = st.integers(0, 220) | st.integers(0, 2**64 - 1) | st.sampled_from([2**32, 2**63 - 1, 2**63, 2**64 - 1])
unsigned32 = st.integers(0, 12) | st.integers(0, 2**32 - 1)
any_enum = st.integers(0, 7) | st.integers(-(2**31), 2**31 - 1)


@given(
    st.builds(
        pb.Chunk,
        group=unsigned32,
        start=unsigned64,
        length=unsigned64,
        count=unsigned32,
        index_codec=any_enum,
        value_codec=any_enum,
        indices=st.binary(max_size=40),
        values=st.binary(max_size=40),
    )
)
@many
def test_any_fields_are_taken_or_refused(chunk):
    taken_or_refused(chunk)
    taken_or_refused(chunk, Span(0, 2**48))

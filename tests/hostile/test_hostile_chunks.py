"""Chunks that lie: each is refused before anything is allocated or applied, and never with another exception."""

import struct

import numpy as np
import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import Span
from pscore.wire import frames
from pscore.wire.codecs.index import INDEX_FORMATS
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb

WITHIN = Span(100, 200)
many = settings(deadline=None, max_examples=400)


def good(codec=pb.INDEX_CODEC_RAW32, offsets=(0, 3, 9), values=(1.0, 2.0, 3.0)):
    """A chunk that is taken; tests break it in one place."""
    return pb.Chunk(
        start=110,
        length=10,
        count=len(offsets),
        index_codec=codec,
        value_codec=pb.VALUE_CODEC_FP32,
        indices=INDEX_FORMATS[codec].encode(np.array(offsets), 10),
        values=struct.pack(f"<{len(values)}f", *values),
    )


def dense(count=5):
    return pb.Chunk(
        start=110,
        length=count,
        count=count,
        index_codec=pb.INDEX_CODEC_DENSE,
        value_codec=pb.VALUE_CODEC_FP32,
        values=bytes(4 * count),
    )


def changed(chunk, **fields):
    for name, value in fields.items():
        setattr(chunk, name, value)
    return chunk


def offsets32(*offsets):
    return struct.pack(f"<{len(offsets)}I", *offsets)


def test_the_unbroken_chunks_are_taken():
    for codec in INDEX_FORMATS:
        assert frames.decode(good(codec), WITHIN).offsets.tolist() == [0, 3, 9]
    assert frames.decode(dense(), WITHIN).entries == 5


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (changed(good(), start=99), ErrorCode.BAD_CHUNK),
        (changed(good(), start=191), ErrorCode.BAD_CHUNK),
        (changed(good(), start=2**64 - 1), ErrorCode.BAD_CHUNK),
        (changed(good(), length=2**64 - 1), ErrorCode.BAD_CHUNK),
        (changed(good(), length=9), ErrorCode.BAD_CHUNK),
        (changed(good(), length=2), ErrorCode.BAD_CHUNK),
        (changed(good(), count=0), ErrorCode.BAD_CHUNK),
        (changed(good(), count=0, indices=b"", values=b""), ErrorCode.BAD_CHUNK),
        (changed(good(), count=2), ErrorCode.BAD_CHUNK),
        (changed(good(), count=4), ErrorCode.BAD_CHUNK),
        (changed(good(), count=2**32 - 1), ErrorCode.BAD_CHUNK),
        (changed(good(), indices=offsets32(0, 3, 10)), ErrorCode.BAD_CHUNK),
        (changed(good(), indices=offsets32(0, 3, 2**32 - 1)), ErrorCode.BAD_CHUNK),
        (changed(good(), indices=offsets32(3, 0, 9)), ErrorCode.BAD_CHUNK),
        (changed(good(), indices=offsets32(0, 9, 3)), ErrorCode.BAD_CHUNK),
        (changed(good(), indices=offsets32(0, 3, 3)), ErrorCode.BAD_CHUNK),
        (changed(good(), indices=offsets32(0, 3)), ErrorCode.BAD_CHUNK),
        (changed(good(), indices=offsets32(0, 3, 9, 9)), ErrorCode.BAD_CHUNK),
        (changed(good(), indices=offsets32(0, 3, 9)[:-1]), ErrorCode.BAD_CHUNK),
        (changed(good(), indices=b""), ErrorCode.BAD_CHUNK),
        (changed(good(), values=bytes(11)), ErrorCode.BAD_CHUNK),
        (changed(good(), values=bytes(16)), ErrorCode.BAD_CHUNK),
        (changed(good(), values=b""), ErrorCode.BAD_CHUNK),
        (changed(good(), value_codec=pb.VALUE_CODEC_FP16), ErrorCode.BAD_CHUNK),
        (changed(good(), value_codec=pb.VALUE_CODEC_UNSPECIFIED), ErrorCode.UNKNOWN_CODEC),
        (changed(good(), value_codec=77), ErrorCode.UNKNOWN_CODEC),
        (changed(good(), index_codec=pb.INDEX_CODEC_UNSPECIFIED), ErrorCode.UNKNOWN_CODEC),
        (changed(good(), index_codec=-5), ErrorCode.UNKNOWN_CODEC),
        (changed(good(), index_codec=pb.INDEX_CODEC_DENSE), ErrorCode.BAD_CHUNK),
        (changed(dense(), length=6), ErrorCode.BAD_CHUNK),
        (changed(dense(), indices=b"\0"), ErrorCode.BAD_CHUNK),
        (changed(good(), values=struct.pack("<3f", 1, float("nan"), 1)), ErrorCode.NON_FINITE),
        (changed(good(), values=struct.pack("<3f", float("inf"), 1, 1)), ErrorCode.NON_FINITE),
        (changed(dense(), values=struct.pack("<5f", 0, 0, 0, 0, float("-inf"))), ErrorCode.NON_FINITE),
        (changed(good(), value_codec=pb.VALUE_CODEC_FP16, values=b"\0\x7c" * 3), ErrorCode.NON_FINITE),
        (changed(good(), value_codec=pb.VALUE_CODEC_BF16, values=b"\x80\x7f" * 3), ErrorCode.NON_FINITE),
    ],
)
def test_a_chunk_that_lies_is_refused(chunk, reason):
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


@given(st.sampled_from(sorted(INDEX_FORMATS)), st.data())
@many
def test_any_damage_to_a_good_chunk_is_taken_or_refused(codec, data):
    raw = bytearray(good(codec).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        if data.draw(st.booleans()) and len(raw) > 1:
            del raw[data.draw(st.integers(0, len(raw) - 1)) :]
        elif raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        chunk = pb.Chunk.FromString(bytes(raw))
    except DecodeError:  # refused by protobuf before it reaches us
        return
    taken_or_refused(chunk)

"""Frames: a segment survives the way over the wire, in chunks that keep their bound and a commit that counts them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice, merge
from pscore.wire import frames
from pscore.wire.codecs.format import MAX_ENTRIES
from pscore.wire.codecs.index import INDEX_FORMATS
from pscore.wire.codecs.values import VALUE_FORMATS
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.pscore.codec_makers import random_support, tail
from tests.pscore.core_makers import as_dict, numbered, segments
from tests.tiers import examples

many = settings(deadline=None, max_examples=examples(150))
chunk_sizes = st.integers(8, 2000)


def over_the_wire(segment, chunk_bytes, within=None):
    reader = frames.ChunkReader(within or segment.span)
    sender = frames.Checksum()
    for chunk, _ in frames.encode(segment, chunk_bytes=chunk_bytes):
        sender.add(chunk)
        reader.read(pb.Chunk.FromString(chunk.SerializeToString()))
    reader.checksum.verify(pb.Commit.FromString(sender.commit().SerializeToString()))
    return reader.segments


@given(segments(), chunk_sizes)
@many
def test_any_segment_comes_back_whole(segment, chunk_bytes):
    received = over_the_wire(segment, chunk_bytes)
    assert as_dict(*received) == as_dict(segment)
    assert all(part.values.dtype == torch.float32 for part in received)


@given(segments(), chunk_sizes, st.integers(0, 40))
@many
def test_offsets_count_from_an_origin_where_one_is_given(segment, chunk_bytes, before):
    origin = max(0, segment.span.start - before)
    reader = frames.ChunkReader(segment.span, origin=origin)
    for chunk, _ in frames.encode(segment, chunk_bytes=chunk_bytes):
        received = reader.read(chunk)
        assert received.span.start == (chunk.start if received.offsets is None else origin)
        assert reader.position == received.span.end == chunk.start + chunk.length
    assert as_dict(*reader.segments) == as_dict(segment)


@given(segments(min_entries=1), chunk_sizes)
@many
def test_a_dense_segment_arrives_dense_and_a_sparse_one_merges_back(segment, chunk_bytes):
    joined = merge(segment.span, over_the_wire(segment, chunk_bytes))
    assert (joined.offsets is None) == (segment.offsets is None)
    assert torch.equal(joined.values, segment.values.float())


@given(segments(), chunk_sizes, st.integers(0, 9))
@many
def test_chunks_keep_their_bound_and_their_group(segment, chunk_bytes, group):
    for chunk, _ in frames.encode(segment, chunk_bytes=chunk_bytes, group=group):
        assert len(chunk.indices) + len(chunk.values) <= chunk_bytes
        assert 0 < chunk.count <= chunk.length
        assert chunk.group == group


forms = st.builds(
    frames.WireForm,
    value=st.none() | st.sampled_from(sorted(VALUE_FORMATS)),
    index=st.none() | st.sampled_from(sorted(INDEX_FORMATS)),
    link_bytes_per_second=st.sampled_from([None, 0.0, 1e5, 1e7, 1e9, 1e11]),
)


@given(segments(), forms, st.integers(64, 2000))
@many
def test_every_form_arrives_as_the_sender_was_told(segment, form, chunk_bytes):
    reader, told = frames.ChunkReader(segment.span), []
    for chunk, decoded in frames.encode(segment, form, chunk_bytes=chunk_bytes):
        assert decoded.dtype == torch.float32
        assert len(chunk.indices) + len(chunk.values) <= chunk_bytes
        assert form.value in (None, chunk.value_codec)
        assert (
            chunk.index_codec == pb.INDEX_CODEC_DENSE
            if segment.offsets is None
            else chunk.index_codec in (INDEX_FORMATS if form.index is None else [form.index])
        )
        reader.read(pb.Chunk.FromString(chunk.SerializeToString()))
        told.append(decoded)
    assert [part.values.tolist() for part in reader.segments] == [decoded.tolist() for decoded in told]
    assert as_dict(*reader.segments).keys() == as_dict(segment).keys()


@pytest.mark.parametrize(("value", "most"), [(pb.VALUE_CODEC_INT4, 12.5), (pb.VALUE_CODEC_BF16, 24.3)])
def test_a_push_of_one_per_cent_needs_the_promised_bits(value, most):
    """Everything counted: index, values, bounds, and the messages around them."""
    offsets = torch.from_numpy(random_support(0.01, 256 << 10))
    values = torch.from_numpy(tail("laplace", 0.25)[: offsets.numel()])
    segment = SparseSlice(Span(0, int(offsets[-1]) + 1), offsets, values)
    form = frames.WireForm(value=value)
    sent = sum(frames.wire_bytes(chunk) for chunk, _ in frames.encode(segment, form, chunk_bytes=1 << 20))
    assert 8 * sent / segment.entries <= most


def test_blocks_of_bounds_are_whole_in_every_chunk_but_the_last():
    form = frames.WireForm(value=pb.VALUE_CODEC_INT4, index=pb.INDEX_CODEC_RICE)
    segment = SparseSlice(Span(0, 100_000), torch.arange(0, 100_000, 2), torch.ones(50_000))
    *full, _ = [chunk.count for chunk, _ in frames.encode(segment, form, chunk_bytes=64 << 10)]
    assert full
    assert all(count % 512 == 0 for count in full)


def test_only_what_the_peer_reads_is_sent():
    segment = SparseSlice(Span(0, 10_000), torch.arange(0, 10_000, 2), torch.ones(5000))
    form = frames.WireForm(allowed=(pb.INDEX_CODEC_RAW32,))
    assert {chunk.index_codec for chunk, _ in frames.encode(segment, form, chunk_bytes=4096)} == {pb.INDEX_CODEC_RAW32}


def test_a_codec_that_suits_the_offsets_badly_still_keeps_the_bound():
    segment = SparseSlice(Span(0, 1 << 20), torch.arange(0, 1 << 20, 1 << 10), torch.ones(1 << 10))
    form = frames.WireForm(index=pb.INDEX_CODEC_BITMAP)
    chunks = [chunk for chunk, _ in frames.encode(segment, form, chunk_bytes=1024)]
    assert max(len(chunk.indices) + len(chunk.values) for chunk in chunks) <= 1024
    assert sum(chunk.count for chunk in chunks) == 1 << 10


@pytest.mark.parametrize("value", [pb.VALUE_CODEC_INT4, pb.VALUE_CODEC_SIGN_MEAN])
def test_a_dense_chunk_has_no_more_entries_than_a_chunk_may_hold(value):
    segment = SparseSlice(Span(0, MAX_ENTRIES + 5), None, torch.ones(MAX_ENTRIES + 5))
    chunks = [chunk for chunk, _ in frames.encode(segment, frames.WireForm(value=value), chunk_bytes=4 << 20)]
    assert [chunk.count for chunk in chunks] == [MAX_ENTRIES, 5]
    assert frames.decode(chunks[0], segment.span).entries == MAX_ENTRIES


def test_offsets_further_apart_than_32_bits_are_cut():
    offsets = torch.tensor([0, 2**32 - 1, 2**32, 2**33 + 5, 2**40])
    segment = SparseSlice(Span(3, 3 + 2**40 + 1), offsets, numbered(5))
    chunks = [chunk for chunk, _ in frames.encode(segment, chunk_bytes=1 << 20)]
    assert all(chunk.length <= 2**32 for chunk in chunks)
    assert as_dict(*over_the_wire(segment, 1 << 20)) == as_dict(segment)


def test_an_empty_segment_needs_no_chunk():
    for offsets in (None, torch.empty(0, dtype=torch.int64)):
        span = Span(0, 0) if offsets is None else Span(0, 9)
        assert list(frames.encode(SparseSlice(span, offsets, torch.empty(0)), chunk_bytes=64)) == []


def commit_of(segment):
    checksum = frames.Checksum()
    for chunk, _ in frames.encode(segment, chunk_bytes=16):
        checksum.add(chunk)
    return checksum


@pytest.mark.parametrize("field", ["chunks", "entries", "crc32"])
def test_a_commit_that_counts_otherwise_is_refused_by_name(field):
    checksum = commit_of(SparseSlice(Span(0, 9), None, numbered(9)))
    commit = checksum.commit()
    checksum.verify(commit)
    setattr(commit, field, getattr(commit, field) ^ 1)
    with pytest.raises(Rejected, match=field) as refused:
        checksum.verify(commit)
    assert refused.value.reason is ErrorCode.BAD_COMMIT


@given(segments(min_entries=1, dtypes=(torch.float32,)), st.data())
@many
def test_the_checksum_sees_every_payload_bit(segment, data):
    chunks = [chunk for chunk, _ in frames.encode(segment, chunk_bytes=64)]
    before, after = frames.Checksum(), frames.Checksum()
    for chunk in chunks:
        before.add(chunk)
    chunk = data.draw(st.sampled_from(chunks))
    name = data.draw(st.sampled_from(["values", "indices"] if chunk.indices else ["values"]))
    payload = bytearray(getattr(chunk, name))
    bit = data.draw(st.integers(0, 8 * len(payload) - 1))
    payload[bit // 8] ^= 1 << bit % 8
    setattr(chunk, name, bytes(payload))
    for each in chunks:
        after.add(each)
    assert before.crc32 != after.crc32


def test_chunks_must_ascend():
    (first, _), (second, _) = frames.encode(SparseSlice(Span(0, 6), None, numbered(6)), chunk_bytes=12)
    reader = frames.ChunkReader(Span(0, 6))
    reader.read(second)
    with pytest.raises(Rejected) as refused:
        reader.read(first)
    assert refused.value.reason is ErrorCode.BAD_CHUNK


@given(st.binary(max_size=300), st.integers(1, 100))
@many
def test_byte_strings_come_back_in_pieces(data, chunk_bytes):
    reader = frames.BytesReader(len(data), len(data))
    for piece in frames.encode_bytes(data, chunk_bytes):
        assert not reader.complete
        assert len(piece.data) <= chunk_bytes
        reader.read(piece)
    assert reader.complete
    assert reader.finish() == data


def test_message_bytes_count_the_framing_of_grpc():
    chunk = pb.Chunk(values=b"12345")
    assert frames.wire_bytes(chunk) == len(chunk.SerializeToString()) + 5

"""Messages with dense values, written and read beside the protobuf library, which is the oracle."""

import numpy as np
import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import Span
from pscore.wire import frames
from pscore.wire.codecs.values import CODEC_OF_DTYPE
from pscore.wire.dense import (
    DenseReader,
    MessageSize,
    bytes_of,
    chunk_field,
    chunk_message,
    cut,
    dense_chunk,
    field_bytes,
    fields,
    message_bytes,
    split_values,
)
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from tests.tiers import examples

many = settings(deadline=None, max_examples=examples(150))
STREAMS = (pb.UploadModelRequest, pb.DownloadModelResponse, pb.PushSparseRequest, pb.PullDiffResponse)
SIZES = st.integers(0, 3000) | st.sampled_from([4095, 4096, 16_384, 70_000])
HEADS = st.builds(
    pb.Chunk,
    group=st.integers(0, 1 << 31),
    start=st.integers(0, 1 << 60),
    length=st.integers(0, 1 << 60),
    count=st.integers(0, 1 << 31),
    index_codec=st.integers(0, 5),
    value_codec=st.integers(0, 5),
    indices=st.binary(max_size=20) | st.just(bytes(5000)),
)


def payload(size, seed=0):
    return np.random.default_rng(seed).bytes(size)


def is_list(kind):
    """Whether a message of this stream may have several chunks."""
    return "chunks" in kind.DESCRIPTOR.fields_by_name


def with_chunk(kind, chunk):
    return kind(chunks=[chunk]) if is_list(kind) else kind(chunk=chunk)


def chunks_of(message):
    if is_list(type(message)):
        return message.chunks
    return [message.chunk] if message.HasField("chunk") else []


def whole(kind, raw):
    """A message as it is read here."""
    rest, values = split_values(raw, several=is_list(kind))
    message = kind.FromString(rest)
    chunks = chunks_of(message)
    assert len(values) <= len(chunks)
    for chunk, data in zip(chunks, values, strict=False):
        assert not (chunk.values and data)
        chunk.values = chunk.values or bytes(data)
    return message


@given(HEADS, st.lists(SIZES, min_size=1, max_size=3), st.sampled_from(STREAMS))
@many
def test_a_message_is_the_librarys_bytes(chunk, sizes, kind):
    parts = [memoryview(payload(size, i)) for i, size in enumerate(sizes)]
    written = chunk_message(chunk, *parts)
    chunk.values = b"".join(parts)
    assert written == with_chunk(kind, chunk).SerializeToString() == chunk_message(chunk)
    assert whole(kind, written) == with_chunk(kind, chunk)
    if len(chunk.values) >= 4096 and not chunk.indices:
        rest, (values,) = split_values(written, several=is_list(kind))
        assert len(rest) < 100
        assert values == chunk.values


@given(st.lists(st.tuples(HEADS, SIZES), min_size=1, max_size=10), st.booleans(), st.booleans())
@many
def test_values_are_found_in_messages_of_several_chunks(drawn, begins, ends):
    message = pb.PushSparseRequest(chunks=[head for head, _ in drawn])
    for seed, (chunk, (_, size)) in enumerate(zip(message.chunks, drawn, strict=True)):
        chunk.values = payload(size, seed)
    fields_of = [chunk_field(chunk) for chunk in message.chunks]
    if begins:
        message.header.step = 3
        fields_of.insert(0, [field_bytes(pb.PushSparseRequest.HEADER_FIELD_NUMBER, message.header)])
    if ends:
        message.commit.chunks = 2
        fields_of.append([field_bytes(pb.PushSparseRequest.COMMIT_FIELD_NUMBER, message.commit)])
    raw = b"".join(part for parts in fields_of for part in parts)
    assert whole(pb.PushSparseRequest, raw) == message
    large = [len(chunk.values) >= 4096 and len(chunk.indices) < 4096 for chunk in message.chunks][: 8 - begins]
    _, values = split_values(raw, several=True)
    assert [len(data) > 0 for data in values] == (large if any(large) else [])


@pytest.mark.parametrize(("rate", "expected"), [(None, 0), (1e6, 20_000), (1e9, (4 << 20) - (64 << 10))])
def test_a_message_takes_so_long_and_is_smaller_than_the_largest_of_grpc(rate, expected):
    assert message_bytes(rate, 0.02) == expected


@pytest.mark.parametrize(("rate", "last"), [(1e5, 1 << 18), (2e7, 2_000_000), (1e10, (4 << 20) - (64 << 10))])
def test_messages_of_a_model_grow_with_the_link_and_not_before_it_has_shown_its_speed(rate, last, monkeypatch):
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    size, sent = MessageSize(1 << 18), 0
    for _ in range(200):
        sent += size.nbytes
        now += size.nbytes / rate
        size.sent(size.nbytes)
        assert size.nbytes <= max(1 << 18, sent // 16)
    assert size.nbytes == pytest.approx(last, rel=1e-6)


@given(st.data(), HEADS, SIZES, st.sampled_from(STREAMS))
@many
def test_any_bytes_are_read_as_the_library_reads_them_or_refused_too(data, chunk, size, kind):
    chunk.values = payload(size)
    raw = bytearray(with_chunk(kind, chunk).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        ends = [st.integers(0, min(len(raw), 60)), st.integers(max(0, len(raw) - 20), len(raw))]
        place = data.draw(st.one_of(ends))
        raw[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    if data.draw(st.booleans()):
        raw += data.draw(st.binary(max_size=10)) + kind(commit=pb.Commit(chunks=3)).SerializeToString()
        raw += data.draw(st.just(b"") | st.just(bytes(raw)))

    def outcome(read):
        try:
            return read(bytes(raw))
        except DecodeError:
            return None

    assert outcome(lambda raw: whole(kind, raw)) == outcome(kind.FromString)


@given(st.binary(max_size=200), st.integers(0, 250))
@many
def test_fields_of_any_bytes_end_inside_them(raw, position):
    for _, start, end in fields(raw, position):
        assert start <= len(raw) + 10
        assert end <= max(len(raw), start)


@given(st.integers(0, 50), st.integers(0, 200), st.integers(1, 30))
def test_a_span_is_cut_without_gaps(start, length, elements):
    parts = list(cut(Span(start, start + length), elements))
    assert [i for part in parts for i in range(part.start, part.end)] == list(range(start, start + length))
    assert all(0 < part.length <= elements for part in parts)


def model_of(dtype, length):
    """Numbers, or words of any bits, and the dtype in which they are read."""
    if dtype.is_floating_point:
        return torch.randn(length).to(dtype), torch.float32
    return torch.randint(0, 256, (length * dtype.itemsize,), dtype=torch.uint8).view(dtype), dtype


@pytest.mark.long
@given(st.sampled_from(list(CODEC_OF_DTYPE)), st.integers(1, 4000), st.integers(1, 1500))
@many
def test_a_model_arrives_as_it_was_sent(dtype, length, elements):
    span = Span(7, 7 + length)
    model, read = model_of(dtype, length)
    sender, reader = frames.Checksum(), DenseReader(span, read)
    for part in cut(span, elements):
        data = bytes_of(model[part.start - 7 : part.end - 7])
        chunk = dense_chunk(part, dtype)
        sender.add(chunk, data)
        head, values = split_values(chunk_message(chunk, data), several=False)
        reader.read(pb.UploadModelRequest.FromString(head).chunk, *values)
    reader.checksum.verify(sender.commit())
    reader.require_complete()
    assert torch.equal(reader.values, model.to(read))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"start": 1}, ErrorCode.BAD_CHUNK),
        ({"index_codec": pb.INDEX_CODEC_RAW32}, ErrorCode.BAD_CHUNK),
        ({"indices": b"x"}, ErrorCode.BAD_CHUNK),
        ({"count": 0, "length": 0}, ErrorCode.BAD_CHUNK),
        ({"count": 11, "length": 11}, ErrorCode.BAD_CHUNK),
        ({"count": (1 << 32) - 1, "length": (1 << 32) - 1}, ErrorCode.BAD_CHUNK),
        ({"count": 3}, ErrorCode.BAD_CHUNK),
        ({"values": bytes(15)}, ErrorCode.BAD_CHUNK),
        ({"value_codec": 99}, ErrorCode.UNKNOWN_CODEC),
        ({"value_codec": pb.VALUE_CODEC_FP16}, ErrorCode.BAD_CHUNK),
        ({"values": b"\x00\x00\x80\xff" * 4}, ErrorCode.NON_FINITE),
        ({"values": b"\x01\x00\xc0\x7f" * 4}, ErrorCode.NON_FINITE),
    ],
)
def test_what_is_no_dense_chunk_of_the_span_does_not_count(change, reason):
    fields_of = {"length": 4, "count": 4, "index_codec": pb.INDEX_CODEC_DENSE, "value_codec": pb.VALUE_CODEC_FP32}
    reader, chunk = DenseReader(Span(0, 10)), pb.Chunk(**fields_of | {"values": bytes(16)} | change)
    with pytest.raises(Rejected) as refused:
        reader.read(chunk)
    assert refused.value.reason is reason
    assert reader.checksum.commit() == pb.Commit()


def test_completeness_counts_every_element():
    reader = DenseReader(Span(0, 6))
    reader.read(dense_chunk(Span(0, 5), torch.float32), bytes_of(torch.ones(5)))
    with pytest.raises(Rejected, match="5 of 6") as refused:
        reader.require_complete()
    assert refused.value.reason is ErrorCode.BAD_COMMIT

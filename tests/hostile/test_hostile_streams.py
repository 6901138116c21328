"""Streams that break the form: pushes and uploads are taken whole or refused, whatever comes in whatever order."""

import random

import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire import frames
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.rpc.workers import read_upload
from psservice.shard.upload import Upload
from psservice.state.stream_readers import plan_of, read_all, read_push
from psservice.values import Identity
from tests.hostile.mutation import mutate_bytes
from tests.tiers import examples

SHARD = Span(10, 110)
GROUPS = (Span(60, 110), Span(10, 60))
many = settings(deadline=None, max_examples=examples(300))
PUSH, UPLOAD = pb.PushSparseRequest, pb.UploadModelRequest


def reason_of(call, *arguments):
    with pytest.raises(Rejected) as refused:
        call(*arguments)
    return refused.value.reason


def push_messages(groups=GROUPS):
    """A good push: two groups, the later one first as gradients come."""
    plan = [pb.Group(start=group.start, length=group.length) for group in groups]
    messages, checksum = [PUSH(header=pb.PushHeader(step=1, plan=plan))], frames.Checksum()
    for number, group in enumerate(groups):
        segment = SparseSlice(group, torch.tensor([0, 7, 30]), torch.tensor([1.0, 2.0, 3.0]))
        for chunk, _ in frames.encode(segment, chunk_bytes=16, group=number):
            checksum.add(chunk)
            messages.append(PUSH(chunks=[chunk]))
    return [*messages, PUSH(commit=checksum.commit())]


def header_with(plan):
    return pb.PushHeader(plan=[pb.Group(start=group.start, length=group.length) for group in plan])


def take_push(messages):
    header, entries, arrivals = read_all(read_push(lambda header: (SHARD, torch.float32)), messages)
    return header, [] if entries is None else [entries], arrivals


def upload_messages(buffers=b"statistics"):
    messages = [UPLOAD(header=pb.UploadHeader(generation=1, buffer_bytes=len(buffers)))]
    checksum = frames.Checksum()
    for chunk, _ in frames.encode(SparseSlice(SHARD, None, torch.arange(100.0)), chunk_bytes=64):
        checksum.add(chunk)
        messages.append(UPLOAD(chunk=chunk))
    messages += [UPLOAD(buffers=piece) for piece in frames.encode_bytes(buffers, 4)]
    return [*messages, UPLOAD(commit=checksum.commit())]


def take_upload(messages):
    """Read an upload that comes in one call; one that is cut is not taken."""
    header, upload, is_whole = read_all(read_upload(new_upload), messages)
    if not is_whole:
        raise Rejected(ErrorCode.BAD_COMMIT, "it is cut")
    return header, [SparseSlice(SHARD, None, upload.model.values)], upload.buffers()


def new_upload(header):
    if header.buffer_bytes != 10:
        raise Rejected(ErrorCode.BAD_REQUEST, "the engine refuses this")
    return Upload(Identity("anna", "1"), header.generation, SHARD, torch.float32, header.buffer_bytes, lambda: 0.0)


STREAMS = {"push": (push_messages, take_push), "upload": (upload_messages, take_upload)}
each_stream = pytest.mark.parametrize(("make", "take"), STREAMS.values(), ids=STREAMS)


def test_a_good_push_is_taken_in_the_order_of_its_groups():
    header, segments, arrivals = take_push(push_messages())
    assert header.step == 1
    (joined,) = segments
    assert joined.span == SHARD
    assert joined.offsets.tolist() == [0, 7, 30, 50, 57, 80]
    assert joined.values.tolist() == [1, 2, 3, 1, 2, 3]
    assert all(nanoseconds > 0 for nanoseconds in arrivals)


def test_a_good_upload_is_taken():
    _, segments, buffers = take_upload(upload_messages())
    assert torch.equal(torch.cat([segment.values for segment in segments]), torch.arange(100.0))
    assert buffers == b"statistics"


def test_a_push_of_nothing_is_a_push():
    messages = [PUSH(header=pb.PushHeader(step=1)), PUSH(commit=pb.Commit())]
    assert take_push(messages)[1] == []


@each_stream
def test_a_stream_that_is_cut_anywhere_is_refused(make, take):
    messages = make()
    assert reason_of(take, []) is ErrorCode.BAD_REQUEST
    for end in range(1, len(messages)):
        assert reason_of(take, messages[:end]) is ErrorCode.BAD_COMMIT


@each_stream
def test_a_stream_that_lacks_or_repeats_any_message_is_refused(make, take):
    messages = make()
    for i in range(len(messages)):
        assert reason_of(take, messages[:i] + messages[i + 1 :]) in ErrorCode
        if take is not take_upload or i != 1:  # its first chunk begins an upload anew
            assert reason_of(take, messages[: i + 1] + messages[i:]) in ErrorCode


@each_stream
def test_an_empty_message_anywhere_is_refused(make, take):
    messages = make()
    for i in range(len(messages) + 1):
        assert reason_of(take, [*messages[:i], type(messages[0])(), *messages[i:]]) is ErrorCode.BAD_REQUEST


@each_stream
def test_the_commit_counts_chunks_entries_and_bits(make, take):
    for field in ("chunks", "entries", "crc32"):
        messages = make()
        setattr(messages[-1].commit, field, getattr(messages[-1].commit, field) ^ 1)
        assert reason_of(take, messages) is ErrorCode.BAD_COMMIT


@each_stream
@given(data=st.data())
@many
def test_any_disorder_is_taken_whole_or_refused(make, take, data):
    messages = make()
    shuffled = data.draw(st.lists(st.sampled_from(range(len(messages))), max_size=2 * len(messages)))
    try:
        taken = take([messages[i] for i in shuffled])
    except Rejected:
        return
    if take is take_upload:
        assert torch.equal(taken[1][0].values, torch.arange(100.0))
    else:
        assert sorted(shuffled) == list(range(len(messages))), "only every message once makes the whole"


@each_stream
@given(seed=st.integers(0, 2**32))
@many
def test_any_damage_to_any_message_is_taken_or_refused(make, take, seed):
    chance, messages = random.Random(seed), make()
    for place in chance.choices(range(len(messages)), k=chance.randint(1, 3)):
        raw = mutate_bytes(messages[place].SerializeToString(), chance)
        try:
            messages[place] = type(messages[place]).FromString(raw)
        except DecodeError:  # refused by protobuf before it reaches us
            return
    try:
        taken = take(messages)
    except Rejected:
        return
    segments = taken[1]
    assert all(SHARD.start <= part.span.start and part.span.end <= SHARD.end for part in segments)
    assert all(bool(part.values.isfinite().all()) for part in segments)


@pytest.mark.parametrize(
    "plan",
    [
        [Span(0, 20)],
        [Span(100, 111)],
        [Span(10, 60), Span(59, 80)],
        [Span(10, 110), Span(20, 30)],
        [Span(50, 60), Span(50, 60)],
        [Span(2**64 - 1, 2**65 - 2)],
    ],
)
def test_groups_that_leave_the_shard_or_overlap_are_refused(plan):
    assert reason_of(plan_of, header_with(plan), SHARD) is ErrorCode.BAD_REQUEST


def test_a_chunk_belongs_to_a_group_of_the_plan_and_lies_inside_it():
    for group, start in ((2, 60), (2**32 - 1, 60), (0, 10), (1, 60)):
        chunk = pb.Chunk(group=group, start=start, length=1, count=1, index_codec=1, value_codec=1, values=bytes(4))
        messages = push_messages()
        messages.insert(1, PUSH(chunks=[chunk]))
        assert reason_of(take_push, messages) is ErrorCode.BAD_CHUNK


def test_an_upload_that_leaves_elements_out_is_refused():
    messages, checksum = [UPLOAD(header=pb.UploadHeader(buffer_bytes=10))], frames.Checksum()
    segment = SparseSlice(SHARD, torch.arange(0, 100, 2), torch.ones(50))
    for chunk, _ in frames.encode(segment, chunk_bytes=1024):
        checksum.add(chunk)
        messages.append(UPLOAD(chunk=chunk))
    messages.append(UPLOAD(buffers=pb.BytesChunk(data=b"statistics")))
    messages.append(UPLOAD(commit=checksum.commit()))
    assert reason_of(take_upload, messages) is ErrorCode.BAD_CHUNK
    del messages[2:-2]  # the first chunk alone
    messages[1] = next(m for m in upload_messages() if m.WhichOneof("message") == "chunk")
    checksum = frames.Checksum()
    checksum.add(messages[1].chunk)
    messages[-1] = UPLOAD(commit=checksum.commit())
    with pytest.raises(Rejected, match="of 100 elements") as refused:
        take_upload(messages)
    assert refused.value.reason is ErrorCode.BAD_COMMIT


@pytest.mark.parametrize("declared", [0, 9, 11, 2**64 - 1])
def test_an_upload_declares_the_bytes_of_buffers_that_the_model_has(declared):
    messages = upload_messages()
    messages[0].header.buffer_bytes = declared
    assert reason_of(take_upload, messages) is ErrorCode.BAD_REQUEST


def test_a_huge_plan_is_checked_without_fuss():
    plan = [Span(10 + i % 100, 11 + i % 100) for i in range(100_000)]
    assert reason_of(plan_of, header_with(plan), SHARD) is ErrorCode.BAD_REQUEST

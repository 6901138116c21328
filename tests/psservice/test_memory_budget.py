"""Bytes in flight: never more than the limits, everything given back, and somebody always gets through."""

import gc
from contextlib import ExitStack

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire import frames
from pscore.wire.codecs.index import INDEX_FORMATS
from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.memory_budget import Kept, MemoryBudget
from psservice.rpc.auth import ANONYMOUS_ADMIN
from psservice.rpc.calls import Call, check
from psservice.rpc.charges import decoded_bytes, largest_stream, received_bytes
from psservice.rpc.workers import read_upload
from psservice.shard.upload import Upload
from psservice.state.stream_readers import read_all, read_push
from psservice.values import Identity
from tests.psservice.service_makers import F32, layout_of
from tests.tiers import examples

MOST, ROOM, WORKER, LARGEST = 120, 80, 60, 50
IDENTITY = pb.WorkerIdentity(worker_id="anna", incarnation="1")


def header_of(plan):
    return pb.PushHeader(identity=IDENTITY, step=1, plan=plan)


def occupied(message):
    return received_bytes(message.ByteSize()) + decoded_bytes(message)


def checked(messages, charge, rpc="PushSparse"):
    """The messages of a call as its reader receives them."""
    call = Call(rpc, ANONYMOUS_ADMIN, reservation=charge)
    for message in messages:
        check(call, message)
        yield message


moves = st.lists(
    st.tuples(
        st.sampled_from(["open", "add", "add", "add", "name", "close"]),
        st.integers(0, 5),
        st.integers(0, 40),
        st.sampled_from("ab"),
    ),
    max_size=60,
)


def refused(call, *arguments):
    """Why a call is refused; ``None`` if it is not."""
    try:
        call(*arguments)
    except Rejected as refusal:
        return refusal.reason
    return None


@given(moves)
def test_the_limits_hold_whatever_comes_and_what_ends_leaves_nothing(script):
    ledger, calls, owners = MemoryBudget(MOST), {}, {}
    for move, number, nbytes, worker in script:
        if move == "open" and number not in calls:
            calls[number] = ledger.receive(LARGEST)
            calls[number].__enter__()
        elif number not in calls:
            continue
        elif move == "close":
            calls.pop(number).__exit__(None, None, None)
            owners.pop(number, None)
        else:
            call, total = calls[number], ledger.received
            oldest = next(iter(calls)) == number
            if move == "name":
                nbytes, worker = 0, owners.setdefault(number, worker)
            mine = [other for other, owner in owners.items() if owner == owners.get(number) and number in owners]
            held = sum(calls[other].bytes for other in mine)
            why = refused(call.belongs_to, worker) if move == "name" else refused(call.add, nbytes)
            if why is None:
                assert call.bytes <= LARGEST
                assert total + nbytes <= ROOM or oldest
                continue
            assert ledger.received == total  # nothing is charged where it is refused
            if why is ErrorCode.BAD_REQUEST:
                assert call.bytes + nbytes > LARGEST
            else:
                assert why is ErrorCode.BUSY
                assert (total + nbytes > ROOM and not oldest) or (held + nbytes > WORKER and mine)
        assert ledger.received == sum(call.bytes for call in calls.values())
        assert ledger.received <= ROOM + LARGEST
    for call in calls.values():
        call.__exit__(None, None, None)
    assert (ledger.received, ledger.receiving, ledger.by_worker) == (0, {}, {})


def test_the_oldest_gets_through_although_it_needs_more_than_the_total():
    ledger = MemoryBudget(10)
    with ledger.receive() as first, ledger.receive() as second:
        first.add(1_000)
        with pytest.raises(Rejected, match="memory-bytes"):
            second.add(1)
    with ledger.receive() as third:
        third.add(1_000)


class Made:
    """What calls send."""

    def __init__(self, nbytes=60):
        self.nbytes = nbytes


def test_what_several_calls_send_counts_once_until_the_last_of_them_ends():
    budget, made = MemoryBudget(300), Made()
    with budget.answer() as first:
        first.add(90)
        first.share(made)
        with budget.answer() as second:
            second.share(made)
            assert budget.total == 60
        with budget.answer() as third:
            third.add(40)
            with pytest.raises(Rejected, match="answers hold 100 bytes"):
                third.add(1)
    assert (budget.total, budget.shared) == (0, {})


def test_what_is_kept_for_the_next_call_counts_once_and_gives_way_to_answers():
    replies = [Made(50), Made(30)]
    budget = MemoryBudget(300, lambda: Kept(replies={id(each): each.nbytes for each in replies}), forget=replies.clear)
    with budget.answer() as first, budget.answer() as second:
        first.share(replies[0])
        assert (budget.total, budget.in_flight) == (80, 50)
        second.add(20)
        assert budget.total == 100
        second.add(30)  # the one that no call sends is dropped
        assert (budget.total, budget.in_flight, replies) == (100, 100, [])
        with pytest.raises(Rejected, match="answers hold 100 bytes"):
            second.add(1)
    assert budget.total == 0


def test_sums_have_three_quarters_and_calls_the_rest():
    sums = 0
    budget = MemoryBudget(400, sums=lambda: sums)
    with budget.receive() as oldest, budget.receive() as push:
        oldest.add(0)
        assert budget.has_room(300)
        assert not budget.has_room(301)
        push.add(101)
        assert not budget.has_room(300), "calls have the room"
        sums = 250
        assert budget.total == 351
        push.clear()
        push.add(100)  # two thirds of 150
        with pytest.raises(Rejected, match="100 are theirs of --memory-bytes"):
            push.add(1)


def test_answers_keep_nothing_out_that_is_received_and_the_other_way_round():
    kept = 0
    budget = MemoryBudget(300, lambda: Kept(kept))
    with budget.receive() as oldest, budget.receive() as push, budget.answer() as slow, budget.answer() as pull:
        oldest.add(0)
        push.add(200)
        pull.add(100)
        kept = 1
        with pytest.raises(Rejected, match="answers hold 101 bytes"):
            pull.add(0)
        slow.add(1)
        push.clear()
        push.add(200)
        assert budget.total == 302


def test_the_oldest_of_a_worker_gets_through_and_other_workers_are_not_concerned():
    ledger = MemoryBudget(4_000)
    with ExitStack() as stack:
        first, second, other = (stack.enter_context(ledger.receive()) for _ in range(3))
        for call, name in ((first, "anna"), (second, "anna"), (other, "bert")):
            call.belongs_to(name)
        first.add(2_000)
        other.add(500)
        with pytest.raises(Rejected, match="'anna'"):
            second.add(1)


def test_a_stream_is_charged_before_it_is_looked_at_and_given_back_however_it_ends():
    ledger = MemoryBudget(1 << 30)
    messages = [pb.PushSparseRequest(chunks=[pb.Chunk(count=5, length=5)]), pb.PushSparseRequest(commit=pb.Commit())]
    with ledger.receive() as charge:
        seen = []

        def reading():
            while (message := (yield)) is not None:
                seen.append(message)
                assert ledger.received == sum(map(decoded_bytes, seen))

        read_all(reading(), checked(messages, charge))
        assert seen == messages
    assert ledger.received == 0
    seen.clear()
    with pytest.raises(RuntimeError, match="cut"), ledger.receive() as charge:
        read_all(reading(), checked(cut_after(messages), charge))
    assert ledger.received == 0


def cut_after(messages):
    yield from messages
    raise RuntimeError("cut")


def push_messages(span, segment, form):
    plan, checksum = [pb.Group(start=span.start, length=span.length)], frames.Checksum()
    yield pb.PushSparseRequest(header=pb.PushHeader(step=1, plan=plan))
    for chunk, _ in frames.encode(segment, form, chunk_bytes=frames.MIN_CHUNK_BYTES):
        checksum.add(chunk)
        yield pb.PushSparseRequest(chunks=[chunk])
    yield pb.PushSparseRequest(commit=checksum.commit())


@given(
    st.integers(1, 400_000),
    st.floats(0, 1),
    st.sampled_from(range(1, 7)),
    st.sampled_from([None, *INDEX_FORMATS]),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=examples(40))
def test_every_valid_push_is_within_what_a_stream_may_occupy(size, density, value, index, seed):
    generator = torch.Generator().manual_seed(seed)
    offsets = (torch.rand(size, generator=generator) <= density).nonzero().view(-1)
    if not offsets.numel():
        return
    segment = SparseSlice(Span(0, size), offsets, torch.randn(offsets.numel(), generator=generator))
    messages = list(push_messages(Span(0, size), segment, frames.WireForm(value, index)))
    assert sum(map(occupied, messages)) <= largest_stream(layout_of((size, F32)), size)


def test_a_plan_of_every_tensor_by_itself_and_an_upload_are_within_it_too():
    layout = layout_of(*[(3, F32)] * 20_000)
    groups = [Span(3 * i, 3 * i + 3) for i in range(20_000)]
    header = pb.PushHeader(plan=[pb.Group(start=group.start, length=group.length) for group in groups])
    sizes = [occupied(pb.PushSparseRequest(header=header))]
    for number, group in enumerate(groups):
        for chunk, _ in frames.encode(SparseSlice(group, None, torch.ones(3)), chunk_bytes=1 << 20, group=number):
            sizes.append(occupied(pb.PushSparseRequest(chunks=[chunk])))
    assert sum(sizes) < largest_stream(layout, layout.size)
    chunks = frames.encode(SparseSlice(Span(0, 1_000_000), None, torch.ones(1_000_000)), chunk_bytes=64 << 10)
    uploaded = sum(occupied(pb.UploadModelRequest(chunk=chunk)) for chunk, _ in chunks)
    assert uploaded < largest_stream(layout_of((1_000_000, F32)), 1_000_000)


def test_a_horde_of_tiny_chunks_is_refused_while_it_is_small():
    span = Span(0, 1_000_000)
    limit = largest_stream(layout_of((1000, F32)), 1000)

    def horde():
        yield pb.PushSparseRequest(header=header_of([pb.Group(start=0, length=span.length)]))
        for i in range(span.length):
            value = b"\0\0\x80\x3f"
            chunk = pb.Chunk(start=i, length=1, count=1, index_codec=1, value_codec=1, values=value)
            yield pb.PushSparseRequest(chunks=[chunk])

    kept = []

    def received():
        for message in horde():
            kept.append(message.SerializeToString())
            charge.add(received_bytes(len(kept[-1])))
            yield message

    ledger = MemoryBudget(1 << 40)
    before = resident_bytes()
    with ledger.receive(limit) as charge, pytest.raises(Rejected, match="larger chunks") as refused:
        read_all(read_push(lambda header: (span, torch.float32)), checked(received(), charge))
    assert refused.value.reason is ErrorCode.BAD_REQUEST
    assert 1000 < len(kept) < 20_000
    assert resident_bytes() - before < limit  # what is charged is not less than what it takes


def test_a_horde_of_empty_groups_is_refused_before_they_are_read():
    request = pb.PushSparseRequest(header=header_of([pb.Group()] * 500_000))
    assert request.ByteSize() < 1_100_000  # well within a message
    with MemoryBudget(1 << 40).receive(largest_stream(layout_of((1000, F32)), 1000)) as charge, pytest.raises(Rejected):
        read_all(read_push(lambda header: pytest.fail("it was read")), checked([request], charge))


def test_a_false_count_is_refused_for_what_it_is():
    chunk = pb.Chunk(length=10, count=(1 << 32) - 1, index_codec=1, value_codec=1, values=b"")
    header = pb.UploadHeader(identity=IDENTITY, generation=1)
    messages = [pb.UploadModelRequest(header=header), pb.UploadModelRequest(chunk=chunk)]
    reading = read_upload(lambda header: Upload(Identity("anna", "1"), 1, Span(0, 10), torch.float32, 0, lambda: 0.0))
    with MemoryBudget(1 << 30).receive(1 << 20) as charge, pytest.raises(Rejected) as refused:
        read_all(reading, checked(messages, charge, "UploadModel"))
    assert refused.value.reason is ErrorCode.BAD_CHUNK


def resident_bytes():
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

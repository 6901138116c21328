"""Replies that workers share: the same bytes for the same question, made once, and never of an older version."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pscore.model.layout import Span
from pscore.model.sparse_slice import SparseSlice
from pscore.wire import frames
from pscore.wire.frames import WireForm
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.model.shared_results import SharedResults
from psservice.replies.shared_reply import ReplyMessages, SharedReply
from psservice.shard.pull import link_class
from tests.psservice.service_makers import F32, Link, chunks_of, layout_of, new_replica, shard_of, sparse_push, writing
from tests.psservice.shard_makers import ANNA, BERT, join, present, pull, push, serving

LAYOUT = layout_of((200, F32), (30, F32))


def reply(position=0, nbytes=1):
    return SharedReply(position, 1, 1, False, nbytes, ReplyMessages((), WireForm(), 1 << 18))


def test_one_of_several_that_ask_at_once_makes_the_reply():
    replies, started, go_on, made = SharedResults(100), threading.Event(), threading.Event(), []

    def make():
        started.set()
        go_on.wait()
        made.append(reply())
        return made[-1]

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(replies.get, "key", 0, make)
        started.wait()
        others = [pool.submit(replies.get, "key", 0, make) for _ in range(3)]
        go_on.set()
        assert {id(each.result()) for each in (first, *others)} == {id(made[0])}


def test_a_reply_without_the_newest_change_is_made_anew():
    replies = SharedResults(100)
    first = replies.get("key", 1, lambda: reply(position=3))
    assert replies.get("key", 3, reply) is first
    assert replies.get("key", 4, lambda: reply(position=4)) is not first


def test_a_failure_is_of_the_one_who_meets_it():
    replies = SharedResults(100)

    def fail():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        replies.get("key", 0, fail)
    assert replies.get("key", 0, reply).position == 0


def test_no_more_is_kept_than_there_is_room_for_and_nothing_of_another_version():
    replies = SharedResults(100)
    first = replies.get("first", 0, lambda: reply(nbytes=60))
    assert replies.get("first", 0, reply) is first
    second = replies.get("second", 0, lambda: reply(nbytes=60))
    assert replies.get("second", 0, reply) is second
    assert replies.get("first", 0, lambda: reply(nbytes=101)) is not first
    again = replies.get("first", 0, reply)
    for name in range(4):
        replies.get(name, 0, reply)
    assert replies.get("first", 0, reply) is not again
    last = replies.get("last", 0, reply)
    replies.clear()
    assert replies.get("last", 0, reply) is not last


@pytest.mark.parametrize("confirmed", [False, True])
def test_messages_are_written_once_and_read_by_all(confirmed):
    parts = [
        SparseSlice(Span(start, start + 300_000), None, torch.randn(300_000)) for start in range(0, 900_000, 300_000)
    ]
    if not confirmed:
        parts = [chunk for part in parts for chunk, _ in frames.encode(part, chunk_bytes=1 << 18)]
    written = []

    def segments():
        for part in parts:
            written.append(part)
            yield part

    messages = ReplyMessages(segments(), WireForm(), 1 << 18)
    assert not written
    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(lambda _: list(messages), range(4))
    assert all(each == first for each in others)
    assert len(written) == len(parts)
    responses = [pb.PullDiffResponse.FromString(data) for data in first]
    assert [len(response.chunks) for response in responses] == [1] * 15
    assert sum(response.HasField("so_far") for response in responses) == 3 * confirmed  # one for each full MiB
    assert [response.HasField("commit") for response in responses] == [False] * 14 + [True]
    assert len(list(messages)) == len(first)


@pytest.mark.parametrize(("rate", "chunks"), [(0.0, [1] * 8), (150e6, [2] * 4), (1e9, [3, 3, 2])])
def test_a_message_has_the_chunks_that_the_link_carries_in_a_moment(rate, chunks):
    whole = SparseSlice(Span(0, 8 << 18), None, torch.randn(8 << 18))
    messages = ReplyMessages([whole], WireForm(link_bytes_per_second=rate), 1 << 20)
    checksum, found = frames.Checksum(), []
    for data in messages:
        response = pb.PullDiffResponse.FromString(data)
        for chunk in response.chunks:
            checksum.add(chunk)
        checksum.verify(response.commit if response.HasField("commit") else response.so_far)
        found.append(len(response.chunks))
    assert found == chunks
    assert response.HasField("commit")


def test_a_reply_that_could_not_be_written_is_made_anew():
    def no_memory():
        raise MemoryError
        yield

    replies = SharedResults(100)
    failed = replies.get(
        "key", 0, lambda: SharedReply(0, 1, 1, False, 1, ReplyMessages(no_memory(), WireForm(), 1 << 18))
    )
    with pytest.raises(MemoryError):
        list(failed.messages)
    assert list(failed.messages) == [], "without a commit a worker asks again"
    assert replies.get("key", 0, reply) is not failed


def test_workers_that_ask_for_the_same_share_a_reply_until_the_next_push():
    with writing() as writer:
        shard = shard_of(LAYOUT, torch.randn(LAYOUT.size))
        links = [Link(shard, writer, new_replica(LAYOUT)) for _ in range(2)]
        for link in links:
            link.pull()
        shard.apply(sparse_push(shard.span, 0.1, 1))
        one, other = (link.reply() for link in links)
        assert one.messages is other.messages
        assert one.number != other.number
        shard.apply(sparse_push(shard.span, 0.1, 2))
        later = links[0].reply()
        assert later.messages is not one.messages
        assert chunks_of(one) == chunks_of(other), "what was begun is sent as it began"


def test_links_of_one_class_share_replies():
    assert [link_class(rate) for rate in (0.0, -1.0, float("nan"), float("inf"))] == [0.0] * 4
    assert link_class(1.1e9) == link_class(1.2e9)
    assert link_class(1e6) < link_class(1e9)
    with serving(LAYOUT, torch.randn(LAYOUT.size)) as shard:
        join(shard, LAYOUT, BERT)
        push(shard, 1, {3: 1.0})
        one = pull(shard, ANNA, base=0)
        assert pull(shard, BERT, base=0).messages is one.messages
        assert present(shard)
        push(shard, 1, {5: 1.0}, BERT)
        assert pull(shard, BERT, base=0).messages is not one.messages

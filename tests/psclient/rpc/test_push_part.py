"""Fields of a push that are sent together, and the bytes of its groups."""

import tracemalloc

from psclient.rpc.shard_stream import PushPart, bytes_together
from psclient.rpc.stream import Stream
from pscore.wire.dense import field_bytes
from pscore.wire.v1 import parameter_server_pb2 as pb


class Unread:
    """A call whose line takes nothing."""

    def cancel(self):
        pass


class Sink:
    def __init__(self):
        self.sent = []

    def send(self, data):
        self.sent.append(b"".join(data))


def make(groups, together):
    stream = Sink()
    return PushPart(1, stream, together, [0] * groups), stream


def test_small_fields_share_a_message_and_leave_with_it():
    part, stream = make(4, 100)
    part.add(b"h" * 10)
    assert stream.sent == []
    part.add(b"a" * 40, group=0)
    part.add(b"b" * 60, group=1)  # 110 would be too many
    assert stream.sent == [b"h" * 10 + b"a" * 40]
    part.add(b"c" * 20, group=2)
    part.add(b"c" * 30, group=2)  # the rest of a group that is in two messages
    part.flush()
    assert [len(each) for each in stream.sent] == [50, 80, 30]
    assert part.group_bytes == [40, 60, 50, 0]


def test_a_large_field_leaves_at_once():
    part, stream = make(1, 100)
    part.add(b"h" * 10)
    part.add(b"a" * 50, b"b" * 60, group=0)
    assert [len(each) for each in stream.sent] == [10, 110]
    assert part.group_bytes == [110]


def test_more_is_sent_together_where_the_link_is_fast():
    assert bytes_together(None) == bytes_together(1e3) == 16384
    assert bytes_together(1e8) == 2_000_000


def test_a_push_to_a_slow_line_has_no_second_copy_of_its_values():
    values = memoryview(bytearray(32 << 20))
    tracemalloc.start()
    try:
        stream = Stream(lambda outgoing: Unread(), None)
        part = PushPart(1, stream, 1 << 20, [0])
        part.add(b"h" * 10)
        for first in range(0, len(values), 1 << 20):
            part.add(b"c" * 20, values[first : first + (1 << 20)], group=0)
        part.flush()
        peak = tracemalloc.get_traced_memory()[1]
        stream.close()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
    assert sum(len(part) for message in part.messages for part in message) == len(values) + 10 + 32 * 20


def test_a_push_goes_on_in_another_generation_with_the_same_bytes():
    part, sent = make(1, 100)
    header = pb.PushHeader(step=3, generation=1)
    part.add(field_bytes(pb.PushSparseRequest.HEADER_FIELD_NUMBER, header))
    part.add(b"c" * 20, memoryview(b"v" * 90), group=0)
    part.go_on_in(2)
    request = pb.PushSparseRequest.FromString(b"".join(part.messages[0]))
    assert (request.header.step, request.header.generation) == (3, 2)
    assert b"".join(part.messages[1]) == sent.sent[1] == b"c" * 20 + b"v" * 90

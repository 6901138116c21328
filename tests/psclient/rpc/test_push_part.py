"""Fields of a push that are sent together, and the bytes of its groups."""

from psclient.rpc.shard_stream import PushPart, bytes_together


class Stream:
    def __init__(self):
        self.sent = []

    def send(self, data):
        self.sent.append(data)


def make(groups, together):
    stream = Stream()
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

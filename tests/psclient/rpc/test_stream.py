"""A stream without progress is cancelled, and one that moves or has nothing to send is not."""

import threading
import time

import grpc
import pytest

from psclient.errors import Transient
from psclient.rpc.stream import Stream

NEVER = lambda: float("inf")  # noqa: E731


class Call:
    """Answers one message, and then waits until it is cancelled; what is sent is taken when a test asks."""

    def __init__(self, outgoing):
        self.cancelled, self.outgoing, self._answers = threading.Event(), outgoing, iter(["first"])

    def __next__(self):
        for answer in self._answers:
            return answer
        self.cancelled.wait(30)
        raise grpc.RpcError

    def cancel(self):
        self.cancelled.set()


def read(stream, idle_seconds, limit=NEVER):
    while True:
        stream.receive(idle_seconds, limit)


@pytest.fixture
def made():
    """Makes streams, which are closed in the end."""
    streams = []
    yield lambda messages=None: streams.append(Stream(Call, messages)) or streams[-1]
    for stream in streams:
        stream.close()


def test_a_call_that_stands_still_is_cancelled_and_said_to_be_lost(made):
    with pytest.raises(Transient, match="nothing has moved") as caught:
        read(made(), 0.1)
    assert caught.value.lost


def test_a_call_that_is_cancelled_elsewhere_is_not_said_to_stand_still(made):
    stream = made()
    stream.cancel()
    with pytest.raises(grpc.RpcError):
        read(stream, 30.0)


def test_a_call_ends_at_its_limit(made):
    end = time.monotonic() + 0.1
    with pytest.raises(Transient):
        read(made(), 30.0, lambda: end)


def test_time_in_which_the_next_message_is_made_does_not_count(made):
    later = time.monotonic() + 60

    def messages():
        yield b"at once"
        stream.sweep(later)
        assert not stream._call.cancelled.is_set(), "the next message is not there yet"
        yield b"late"

    stream = made(messages())
    stream.begin(10.0)
    assert next(stream._call.outgoing) == b"at once"
    assert next(stream._call.outgoing) == b"late"
    stream.sweep(later)
    assert stream._call.cancelled.is_set(), "the message is not on its way after a minute"


def test_bytes_that_the_server_has_received_count_as_progress(made):
    stream = made([b"a"])
    stream.begin(10.0)
    began = time.monotonic()
    assert next(stream._call.outgoing) == b"a"
    time.sleep(0.05)
    stream.note_receipt()
    stream.sweep(began + 10.04)
    assert not stream._call.cancelled.is_set()

"""A streaming call without progress is cancelled, and one that moves or has nothing to send is not."""

import threading
import time

import grpc
import pytest

from psclient.errors import Transient
from psclient.rpc.stall import StreamCall


class Call:
    """Answers one message, and then waits until it is cancelled."""

    def __init__(self):
        self.cancelled = threading.Event()

    def __iter__(self):
        yield "first"
        self.cancelled.wait(30)
        raise grpc.RpcError

    def result(self):
        self.cancelled.wait(30)
        raise grpc.FutureCancelledError

    def cancel(self):
        self.cancelled.set()


def read(stream):
    return list(stream.messages())


@pytest.mark.parametrize("wait", [read, StreamCall.result])
def test_a_call_that_stands_still_is_cancelled_and_said_to_be_lost(wait):
    with pytest.raises(Transient, match="nothing has moved") as caught:
        wait(StreamCall(0.1).start(Call()))
    assert caught.value.lost


@pytest.mark.parametrize(("wait", "error"), [(read, grpc.RpcError), (StreamCall.result, grpc.FutureCancelledError)])
def test_a_call_that_is_cancelled_elsewhere_is_not_said_to_stand_still(wait, error):
    stream = StreamCall(30.0).start(Call())
    stream.cancel()
    with pytest.raises(error):
        wait(stream)


def test_a_call_ends_at_its_limit():
    end = time.monotonic() + 0.1
    with pytest.raises(Transient):
        read(StreamCall(30.0, lambda: end).start(Call()))


def test_time_without_anything_to_send_does_not_count():
    stream, call = StreamCall(10.0), Call()
    stream.start(call)
    sending, later = stream.outgoing(iter("ab")), time.monotonic() + 60
    assert next(sending) == "a"
    waiting = StreamCall(10.0)
    waiting.start(other := Call())
    blocked = waiting.outgoing(_wait_then_look(waiting, later, other))
    assert next(blocked) == "late"
    stream.sweep(later)
    assert call.cancelled.is_set(), "the message is not on its way after a minute"
    waiting.end()
    stream.end()


def _wait_then_look(stream, later, call):
    stream.sweep(later)
    assert not call.cancelled.is_set(), "the next message is not there yet"
    yield "late"


def test_bytes_that_the_server_has_received_count_as_progress():
    stream, call = StreamCall(10.0), Call()
    stream.start(call)
    began = time.monotonic()
    time.sleep(0.05)
    stream.note_receipt()
    stream.sweep(began + 10.04)
    assert not call.cancelled.is_set()
    stream.end()

"""A channel that is replaced while other threads use it, and how long an attempt may take."""

import gc
import time
import weakref

import pytest
from grpc import StatusCode

from psclient.errors import ServerUnreachableError, Transient
from psclient.rpc import channel as module
from psclient.rpc.channel import Connection, RetryPolicy
from pscore.net.channels import Security
from pscore.wire.errors import ErrorCode


def test_a_call_that_is_under_way_outlives_one_renewal():
    connection, closed = Connection("127.0.0.1:1", Security()), []
    before = connection.stub

    class Closing:
        def close(self):
            closed.append(connection.stub is not before)

    connection._channel.close()
    connection._channel = Closing()
    connection.reconnect(at_once=True)
    assert not closed
    connection.reconnect(at_once=True)
    assert closed == [True]
    connection.close()


def test_channels_are_not_made_faster_than_they_can_dial(monkeypatch):
    connection = Connection("127.0.0.1:1", Security())
    first = connection.stub
    monkeypatch.setattr(module, "_DIAL_SECONDS", 3600.0)
    connection.reconnect()
    assert connection.stub is first
    monkeypatch.setattr(module, "_DIAL_SECONDS", 0.0)
    connection.reconnect()
    assert connection.stub is not first
    connection.close()


def test_a_closed_connection_stays_closed():
    connection = Connection("127.0.0.1:1", Security())
    connection.close()
    before = connection.stub
    connection.reconnect(at_once=True)
    assert connection.stub is before


def test_the_last_attempt_has_a_whole_deadline_and_no_attempt_a_longer_one_than_is_left():
    deadlines = []

    def attempt(seconds):
        deadlines.append(seconds)
        raise Transient("UNAVAILABLE: nobody listens")

    with pytest.raises(ServerUnreachableError):
        RetryPolicy(seconds=1.0, deadline_seconds=5.0).run("127.0.0.1:1", attempt)
    assert len(deadlines) > 1
    assert set(deadlines) == {5.0}, "neither cut to the rest of the patience, nor doubled beyond it"


def test_a_limit_cuts_attempts_short():
    end = time.monotonic() + 2.0
    policy = RetryPolicy(seconds=60.0, deadline_seconds=5.0, limit=lambda: end)
    assert policy.run("127.0.0.1:1", lambda seconds: seconds) <= 2.0


def test_a_full_disk_is_told_once_and_a_busy_server_is_not(caplog):
    for reason, lines in ((ErrorCode.NOT_DURABLE, 2), (ErrorCode.BUSY, 0)):  # that it is so, and that it is over
        caplog.clear()
        failures = [Transient("no space left", 0.01, reason)] * 2

        def attempt(_, failures=failures):
            if failures:
                raise failures.pop()

        RetryPolicy(seconds=60.0, deadline_seconds=5.0).run("127.0.0.1:1", attempt)
        assert len(caplog.records) == lines, reason


@pytest.mark.parametrize(
    ("code", "busy_seconds", "failures", "lines"),
    [
        (StatusCode.DEADLINE_EXCEEDED, 3600.0, 2, 0),  # it begins, say, on a machine with other work
        (StatusCode.DEADLINE_EXCEEDED, 0.0, 1, 2),
        (StatusCode.CANCELLED, 3600.0, 1, 0),  # this worker has compiled, and its stream was idle meanwhile
        (StatusCode.CANCELLED, 3600.0, 2, 2),
        (StatusCode.UNAVAILABLE, 3600.0, 1, 2),
    ],
)
def test_a_busy_start_is_no_outage_and_silence_that_lasts_is_one(
    code, busy_seconds, failures, lines, caplog, monkeypatch
):
    monkeypatch.setattr(module, "_BUSY_SECONDS", busy_seconds)
    left = [Transient(f"{code.name}: no answer", code=code)] * failures

    def attempt(_):
        if left:
            raise left.pop()

    with caplog.at_level("WARNING", "psclient"):
        RetryPolicy(seconds=60.0, deadline_seconds=5.0).run("127.0.0.1:1", attempt)
    assert len(caplog.records) == lines, caplog.messages


def test_what_an_attempt_refers_to_is_freed_with_the_call():
    class Push:
        pass

    connection, push = Connection("127.0.0.1:1", Security()), Push()
    freed = weakref.ref(push)

    def attempt(seconds, push=push):
        return "answer"

    gc.disable()
    try:
        assert connection.call(RetryPolicy(seconds=1.0, deadline_seconds=1.0), attempt) == "answer"
        del attempt, push
        assert freed() is None, "a whole push would stay until cycles are collected"
    finally:
        gc.enable()
        connection.close()

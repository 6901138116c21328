"""A channel that is replaced while other threads use it, and how long an attempt may take."""

import time

import pytest

from psclient.connection import Connection, Patience
from psclient.errors import ServerUnreachableError, Transient
from pscore.channels import Security


def test_a_channel_is_closed_only_when_calls_go_over_the_next_one():
    connection, seen = Connection("127.0.0.1:1", Security()), []
    before = connection.stub

    class Closing:
        def close(self):
            seen.append(connection.stub is not before)

    connection._channel.close()
    connection._channel = Closing()
    connection.renew()
    connection.close()
    assert seen == [True], "a call on a closed channel is a ValueError, which nobody expects"


def test_the_last_attempt_has_a_whole_deadline_and_no_attempt_a_longer_one_than_is_left():
    deadlines = []

    def attempts():
        for attempt in Patience("127.0.0.1:1", seconds=1.0, deadline_seconds=5.0):
            with attempt:
                deadlines.append(attempt.timeout)
                raise Transient("UNAVAILABLE: nobody listens")

    with pytest.raises(ServerUnreachableError):
        attempts()
    assert len(deadlines) > 1
    assert set(deadlines) == {5.0}, "neither cut to the rest of the patience, nor doubled beyond it"


def test_a_limit_cuts_attempts_short():
    end = time.monotonic() + 2.0
    for attempt in Patience("127.0.0.1:1", seconds=60.0, deadline_seconds=5.0, limit=lambda: end):
        assert attempt.timeout <= 2.0
        break

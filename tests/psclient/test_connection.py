"""A channel that is replaced while other threads use it."""

from psclient import connection as module
from psclient.connection import Connection
from pscore.channels import Security


def test_a_call_that_is_under_way_outlives_one_renewal():
    connection, closed = Connection("127.0.0.1:1", Security()), []
    before = connection.stub

    class Closing:
        def close(self):
            closed.append(connection.stub is not before)

    connection._channel.close()
    connection._channel = Closing()
    connection.renew()
    assert not closed
    connection.renew()
    assert closed == [True]
    connection.close()


def test_channels_are_not_made_faster_than_they_can_dial(monkeypatch):
    connection = Connection("127.0.0.1:1", Security())
    first = connection.stub
    monkeypatch.setattr(module, "_DIAL_SECONDS", 3600.0)
    connection.look_again()
    assert connection.stub is first
    monkeypatch.setattr(module, "_DIAL_SECONDS", 0.0)
    connection.look_again()
    assert connection.stub is not first
    connection.close()


def test_a_closed_connection_stays_closed():
    connection = Connection("127.0.0.1:1", Security())
    connection.close()
    before = connection.stub
    connection.renew()
    assert connection.stub is before

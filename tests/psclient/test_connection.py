"""A channel that is replaced while other threads use it."""

from psclient.connection import Connection
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

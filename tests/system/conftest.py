"""What tests of real servers share."""

import pytest

from psclient.rpc.local_server import LocalServer
from psservice.app.server import Server
from psservice.settings import ServerSettings


@pytest.fixture
def start():
    """Servers in this process, over loopback all the same."""

    def begin(**settings):
        ports = {"listen": "127.0.0.1:0", "health_listen": "", "metrics_listen": ""}
        values = ports | {"down_mode": "exact", "lease_seconds": 3600, "rpc_threads": 4} | settings
        running.append(Server(ServerSettings.model_validate(values)))
        return running[-1]

    running = []
    yield begin
    for server in running:
        server.settings = server.settings.model_copy(update={"drain_seconds": 0.0})
        server.stop()


@pytest.fixture
def server():
    """A server of this test alone, which answers exactly; a file that needs another has its own."""
    with LocalServer(down_mode="exact", lease_seconds=60) as running:
        yield running

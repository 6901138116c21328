"""A server that tests of a file may attack in turn, and a raw worker of it."""

import pytest

from psclient.rpc.local_server import LocalServer
from tests.system.raw import joined


@pytest.fixture(scope="module")
def server():
    with LocalServer(down_mode="exact", lease_seconds=120) as running:
        yield running


@pytest.fixture
def worker(server):
    return joined(server.addresses[0])

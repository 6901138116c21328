"""A proxy in the environment: nothing on this machine goes through it, and elsewhere failures name it."""

import socket
import threading

import pytest
import torch

import psclient
from psclient.cli import main as psclient_main
from psclient.errors import ServerUnreachableError
from psclient.settings import ClientSettings
from psservice.cli.main import main
from tests.tiers import long_but


class Proxy:
    """A proxy that refuses everything, and keeps what it was asked for."""

    def __init__(self):
        self.asked = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with connection:
                self.asked.append(connection.recv(4096).decode())
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")

    def close(self):
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


@pytest.fixture(params=long_but(["grpc_proxy"], ["http_proxy", "https_proxy", "grpc_proxy"]))
def proxy(request, monkeypatch):
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    made = Proxy()
    monkeypatch.setenv(request.param, made.url)
    yield made
    made.close()


def test_nothing_on_this_machine_goes_through_a_proxy(proxy, tmp_path, capsys):
    w = torch.nn.Parameter(torch.zeros(8))
    with psclient.ASGD([w], lr=0.1, server="local") as optimizer:  # starts a server
        w.sum().backward()
        optimizer.step()
    with psclient.LocalServer(shards=2, health_listen="127.0.0.1:0") as server:
        for named in (server.server, server.server.replace("127.0.0.1", "localhost")):
            w = torch.nn.Parameter(torch.zeros(8))
            settings = ClientSettings(connect_seconds=10, patience_seconds=10)
            with psclient.ASGD([w], lr=0.1, server=named, settings=settings) as optimizer:
                w.sum().backward()
                optimizer.step()
            assert main(["status", *named.split(",")]) == 0
            assert psclient_main(["save", named, "--out", str(tmp_path / "model.safetensors")]) == 0
        assert main(["health", server.health_addresses[0]]) == 0
        assert main(["health", server.health_addresses[0].replace("127.0.0.1", "localhost")]) == 0
    assert proxy.asked == []


def test_a_failure_elsewhere_names_the_proxy_and_how_to_leave_it_out(proxy, capsys):
    with pytest.raises(ServerUnreachableError) as failed:
        psclient.download("192.0.2.1:50051", patience_seconds=0.5, deadline_seconds=3)
    assert main(["status", "192.0.2.1:50051", "--timeout", "5"]) == 1
    assert main(["status", "192.0.2.1:50051,192.0.2.2:50051", "--timeout", "5"]) == 1
    printed = capsys.readouterr()
    for said in (str(failed.value), printed.err):
        assert proxy.url in said
        assert "no_proxy=192.0.2.1" in said
    assert printed.err.count(proxy.url) == 3
    assert proxy.asked[0].startswith("CONNECT 192.0.2.1:50051")

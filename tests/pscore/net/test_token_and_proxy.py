"""A token stays on the machine where a proxy is set in the environment."""

import socket

import grpc
import pytest

from pscore.net.channels import Security, open_channel
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub


def test_a_token_for_loopback_does_not_go_through_a_proxy(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as proxy, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        proxy.settimeout(0.2)
        with open_channel(f"127.0.0.1:{port}", Security(token="secret")) as channel:
            with pytest.raises(grpc.RpcError):
                ParameterServerServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=2)
            with pytest.raises(TimeoutError):
                proxy.accept()

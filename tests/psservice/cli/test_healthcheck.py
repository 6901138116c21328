"""``psservice health``: what a container's health check is told."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from psservice.cli.main import main

STATES = health_pb2.HealthCheckResponse


@pytest.fixture(name="service")
def running_service() -> Iterator[tuple[health.HealthServicer, str]]:
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait(30)


def test_a_server_that_serves_is_healthy(service, capsys):
    servicer, address = service
    servicer.set("", STATES.SERVING)
    assert main(["health", address, "--timeout", "30"]) == 0
    assert capsys.readouterr().out == f"{address}: serving\n"


def test_a_server_that_drains_is_not(service, capsys):
    servicer, address = service
    servicer.set("", STATES.NOT_SERVING)
    assert main(["health", address, "--timeout", "30"]) == 1
    assert f"{address}: NOT_SERVING" in capsys.readouterr().err


def test_a_server_that_is_gone_is_not_and_the_address_is_named(capsys):
    with ThreadPoolExecutor(1) as pool:
        other = grpc.server(pool)
        gone = other.add_insecure_port("127.0.0.1:0")
        other.start()
        other.stop(None).wait(30)
    assert main(["health", f"127.0.0.1:{gone}", "--timeout", "30"]) == 1
    assert f"--health-listen 127.0.0.1:{gone}" in capsys.readouterr().err


def test_it_does_not_ask_a_proxy(service, monkeypatch):
    servicer, address = service
    servicer.set("", STATES.SERVING)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert main(["health", address, "--timeout", "30"]) == 0

"""Ports that nobody has named: servers of one host side by side, killed and started again."""

import json
import signal

import pytest

from psclient.errors import ConfigurationError
from psclient.rpc.local_server import LocalServer
from psservice.cli import main as cli
from verify.cluster.servers import free_ports

UNNAMED = {"health_listen": None, "metrics_listen": None}


def port_of(address):
    return int(address.rpartition(":")[2])


def test_servers_of_one_host_take_different_ports_and_say_which(tmp_path):
    log = tmp_path / "log"
    with (
        log.open("w") as stream,
        LocalServer(shards=3, log_to=stream, log_level="info", log_format="json", **UNNAMED) as server,
    ):
        addresses = [*server.addresses, *server.health_addresses, *server.metrics_addresses]
        assert len({port_of(address) for address in addresses}) == 9
    serving = [each for each in map(json.loads, log.read_text().splitlines()) if each["message"] == "serving"]
    assert {each["health"] for each in serving} == {*server.health_addresses}
    assert {each["metrics"] for each in serving} == {*server.metrics_addresses}


def test_ports_that_nobody_has_named_are_never_those_that_somebody_names():
    """The default of workers, 50051, is a port that the kernel gives away too."""
    with LocalServer(shards=2, **UNNAMED) as server:
        for address in (*server.addresses, *server.health_addresses, *server.metrics_addresses):
            assert 20_000 <= port_of(address) < 30_000


def test_a_server_that_was_killed_finds_its_port_beside_one_that_started_meanwhile():
    named = [f"127.0.0.1:{port}" for port in free_ports(3)]  # any server may take one that nobody has named
    with LocalServer(listen=named[0], health_listen=named[1], metrics_listen=named[2]) as first:
        first.processes[0].send_signal(signal.SIGKILL)
        first.processes[0].wait(60)
        with LocalServer(**UNNAMED) as second:
            first.restart()
            for server in (first, second):
                assert cli.main(["health", server.health_addresses[0], "--timeout", "30"]) == 0


def test_a_port_that_was_named_and_is_taken_is_an_error(tmp_path):
    log = tmp_path / "log"
    with LocalServer() as server, log.open("w") as stream:
        with pytest.raises(ConfigurationError, match="status 1"):
            LocalServer(log_to=stream, health_listen=server.addresses[0])
        assert f"cannot listen on {server.addresses[0]} (--health-listen)" in log.read_text()


def test_health_asks_the_server_that_was_named_and_none_else(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["health"])
    assert ended.value.code == 2
    assert "ADDRESS" in capsys.readouterr().err

"""Which calls go through the proxy of the environment, and what is said of it."""

import socket

import pytest

from pscore.net import proxies
from pscore.net.proxies import proxy_options, told_of_proxy

DIRECT = (("grpc.enable_http_proxy", 0),)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    proxies._is_here.cache_clear()


@pytest.mark.parametrize("variable", ["grpc_proxy", "https_proxy", "http_proxy"])
@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "127.8.8.8:1", "[::1]:1", "localhost:1", "dns:///localhost:1", "0.0.0.0:1"]
)
def test_no_proxy_is_used_for_this_machine(variable, address, monkeypatch):
    monkeypatch.setenv(variable, "http://proxy.example.org:3128")
    assert proxy_options(address) == DIRECT
    assert told_of_proxy(address) == ""


@pytest.mark.parametrize(
    ("found", "is_direct"),
    [(["127.0.0.1"], True), (["::1", "127.0.1.1"], True), (["127.0.0.1", "10.0.0.1"], False), ([], False)],
)
def test_a_name_counts_as_what_it_resolves_to(found, is_direct, monkeypatch):
    def look_up(host, port, type):
        if not found:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, type, 6, "", (address, 0)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setenv("http_proxy", "http://proxy.example.org:3128")
    assert proxy_options("trainer:50051") == (DIRECT if is_direct else ())


def test_no_name_is_looked_up_where_no_proxy_is_set(monkeypatch):
    def look_up(*_, **__):
        raise AssertionError("a lookup")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert proxy_options("ps.example.org:50051") == DIRECT
    monkeypatch.setenv("http_proxy", "http://proxy.example.org:3128")
    monkeypatch.setenv("no_proxy", "example.com, .example.org")
    assert proxy_options("ps.example.org:50051") == DIRECT


def test_a_proxy_is_named_without_its_password(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://anna:secret@proxy.example.org:3128")
    said = told_of_proxy("10.0.0.1:50051")
    assert "secret" not in said
    for word in ("http://proxy.example.org:3128", "http_proxy", "no_proxy=10.0.0.1"):
        assert word in said


@pytest.mark.parametrize("password", ["sec#ret", "sec/ret", "sec?ret", "sec@ret", "sec:ret"])
def test_no_part_of_a_password_is_shown(password, monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://anna:{password}@proxy.example.org:3128")
    said = told_of_proxy("10.0.0.1:50051")
    assert "http://proxy.example.org:3128" in said
    assert not any(part in said for part in ("sec", "ret", "anna"))


@pytest.mark.parametrize(
    "value",
    [
        "",  # turns the proxy of the variables behind it off, too
        "socks5://proxy.example.org:1080",
        "https://proxy.example.org:3128",
        "anna:secret@proxy.example.org:3128",
        "proxy.example.org:3128",
    ],
)
def test_a_proxy_that_grpc_does_not_use_is_not_named(value, monkeypatch):
    monkeypatch.setenv("grpc_proxy", value)
    monkeypatch.setenv("http_proxy", "http://proxy.example.org:3128")
    assert told_of_proxy("10.0.0.1:50051") == ""
    assert proxy_options("10.0.0.1:50051") == DIRECT

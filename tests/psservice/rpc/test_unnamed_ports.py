"""Which port a server takes where none is named."""

import contextlib

import pytest

from psservice.process.shard_processes import _with_ports
from psservice.rpc import ports
from psservice.settings import ServerSettings


def unbound(number):
    raise OSError(f"{number} is taken")


def test_an_unnamed_port_is_none_that_the_settings_name(monkeypatch):
    """A server that was started again took its own port for metrics once, and could not listen on it then."""
    monkeypatch.setattr(ports, "_UNNAMED_PORTS", range(19_000, 19_004))
    for _ in range(20):
        assert ports.bind_port("127.0.0.1", 0, lambda number: number, {19_000, 19_001, 19_003}) == 19_002


def test_a_named_port_is_taken_though_others_may_not_take_it():
    assert ports.bind_port("127.0.0.1", 19_000, lambda number: number, {19_000}) == 19_000


def test_where_no_port_is_free_the_last_error_is_raised(monkeypatch):
    monkeypatch.setattr(ports, "_UNNAMED_PORTS", range(19_000, 19_004))
    with pytest.raises(OSError, match="is taken"):
        ports.bind_port("127.0.0.1", 0, unbound)


def test_no_address_of_several_shards_gets_a_port_that_another_one_names(monkeypatch):
    monkeypatch.setattr(ports, "_UNNAMED_PORTS", range(28_000, 28_012))
    for _ in range(20):
        settings = ServerSettings(listen="127.0.0.1:28004", metrics_listen="127.0.0.1:0", health_listen="", shards=3)
        first = int(_with_ports(settings).metrics_listen.rpartition(":")[2])
        assert {*range(first, first + 3)}.isdisjoint({28_004, 28_005, 28_006})


def test_a_port_that_is_taken_is_not_tried(monkeypatch):
    """gRPC would log an error, and the certificate of a failed port cannot be used for the next one."""
    monkeypatch.setattr(ports, "_UNNAMED_PORTS", range(19_000, 19_004))
    with contextlib.ExitStack() as held:
        for number in (19_000, 19_001, 19_003):
            with contextlib.suppress(OSError):
                held.enter_context(ports.hold_port("127.0.0.1", number))
        assert ports.bind_port("127.0.0.1", 0, lambda number: number) == 19_002

"""A flood of refused calls leaves few lines, and their number; what operators have done always leaves one."""

import logging
from types import SimpleNamespace

import pytest

from pscore.wire.errors import ErrorCode, Rejected
from psservice.rpc.audit import AuditTrail
from psservice.rpc.auth import ANONYMOUS_ADMIN, Authenticator, Credentials
from psservice.rpc.caller import Caller, Role
from psservice.rpc.calls import Call
from psservice.rpc.certificate_names import CertificateNames
from psservice.rpc.file_watcher import FileWatcher

CONTEXT = SimpleNamespace(peer=lambda: "ipv4:10.0.0.9:5", auth_context=dict)
REFUSED = Rejected(ErrorCode.PERMISSION_DENIED, "no")


@pytest.fixture
def now():
    return [1000.0]


@pytest.fixture
def trail(now):
    return AuditTrail(Authenticator(None, FileWatcher()), lambda: now[0])


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.DEBUG, "psservice.audit")
    return lambda level=logging.INFO: [
        record.__dict__
        for record in caplog.records
        if record.name.startswith("psservice.audit") and record.levelno >= level
    ]


def test_of_a_flood_a_hundred_lines_and_then_one_a_second_are_written(trail, now, lines):
    for _ in range(1000):
        trail.refused("Drain", CONTEXT, Credentials(), REFUSED)
    assert len(lines()) == 100
    now[0] += 2.5
    for _ in range(50):
        trail.refused("Drain", CONTEXT, Credentials(), REFUSED)
    assert len(lines()) == 102
    assert [line.get("left_out") for line in lines()[-3:]] == [None, 900, None]
    now[0] += 86400
    for _ in range(1000):
        trail.refused("Drain", CONTEXT, Credentials(), REFUSED)
    assert len(lines()) == 202
    assert lines()[102]["left_out"] == 48


def test_what_an_operator_does_has_a_line_also_in_a_flood(trail, lines):
    for _ in range(1000):
        trail.operators_call(Call("FinishRun", Caller(Role.WORKER)), CONTEXT, REFUSED)
    assert len(lines()) == 100
    call = Call("EvictWorker", ANONYMOUS_ADMIN, audit={"worker": "w0"})
    trail.operators_call(call, CONTEXT, None)
    assert (lines()[-1]["worker"], lines()[-1]["outcome"], lines()[-1]["role"]) == ("w0", "OK", "admin")


def test_a_call_that_only_comes_back_later_is_for_debugging(trail, lines):
    for _ in range(200):
        trail.refused("PushSparse", CONTEXT, Credentials(), Rejected(ErrorCode.BUSY, "later", retry_seconds=1.0))
    assert lines() == []
    assert len(lines(logging.DEBUG)) == 200
    trail.refused("Drain", CONTEXT, None, REFUSED)
    assert len(lines()) == 1


def test_who_is_unknown_is_named_by_what_it_shows(tmp_path, lines):
    (tmp_path / "roles").write_text("admin somebody.example.org\n")
    (tmp_path / "tokens").write_text("admin a-secret-token\n")
    watcher = FileWatcher()
    trail = AuditTrail(Authenticator(tmp_path / "tokens", watcher, tmp_path / "roles"))
    watcher.close()
    names = CertificateNames(("nobody.example.org",))
    for shown in (Credentials("Bearer another-secret"), Credentials(names=names), Credentials("Basic a-secret")):
        trail.refused("Drain", CONTEXT, shown, REFUSED)
    by_token, by_name, neither = lines()
    assert by_token["token"].startswith("sha256:")
    assert by_name["certificate"] == "nobody.example.org"
    assert "token" not in neither
    assert "secret" not in str(lines())


def test_a_long_reason_is_cut(trail, lines):
    trail.refused("Drain", CONTEXT, None, Rejected(ErrorCode.BAD_REQUEST, "x" * 100_000))
    assert len(lines()[0]["detail"]) < 3000

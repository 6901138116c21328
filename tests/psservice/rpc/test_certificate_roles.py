"""What a file of certificates' roles may hold, and which of its lines names a certificate."""

import asyncio

import pytest

from pscore.wire.errors import ErrorCode, Rejected
from psservice.rpc.auth import Authenticator, Credentials
from psservice.rpc.caller import Role
from psservice.rpc.certificate_names import CertificateNames
from psservice.rpc.certificate_roles import read_certificate_roles
from psservice.rpc.file_watcher import FileWatcher
from psservice.rpc.watched_files import SecurityError

LINES = """\
# who
admin   sparseps-admin      # us
shard   psservice
worker  *.workers.example.org
worker  anna.example.org  anna
worker  spiffe://example.org/workers/*
READER  Readers.example.org
reader  spiffe://example.org/anybody
reader  admin.workers.example.org
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "roles"
    path.write_text(LINES)
    return path


@pytest.fixture
def watcher():
    watcher = FileWatcher()
    yield watcher
    watcher.close()


def names(*dns, uris=()):
    return CertificateNames(dns, tuple(uris))


@pytest.mark.parametrize(
    ("shown", "role", "by"),
    [
        (names("sparseps-admin"), Role.ADMIN, "sparseps-admin"),
        (names("unknown", "sparseps-admin"), Role.ADMIN, "sparseps-admin"),
        (names("w0.workers.example.org"), Role.WORKER, "w0.workers.example.org"),
        (names("readers.example.org"), Role.READER, "readers.example.org"),
        (names(uris=["spiffe://example.org/workers/w-0.a_b"]), Role.WORKER, "spiffe://example.org/workers/w-0.a_b"),
        (names("readers.example.org", "sparseps-admin"), Role.ADMIN, "sparseps-admin"),  # by the file's first line
        (names("admin.workers.example.org"), Role.WORKER, "admin.workers.example.org"),  # the star stands above
    ],
)
def test_the_first_line_that_names_a_certificate_gives_its_role(shown, role, by, path):
    caller = read_certificate_roles(path).caller(shown)
    assert (caller.role, caller.certificate, caller.worker, caller.is_shard) == (role, by, "", False)


@pytest.mark.parametrize(
    "shown",
    [
        names(),
        names("sparseps-admin.example.org"),
        names("x.sparseps-admin"),
        names("workers.example.org"),
        names("a.b.workers.example.org"),
        names(".workers.example.org"),
        names("*.workers.example.org"),
        names("*"),
        names("é.workers.example.org"),
        names("spiffe://example.org/anybody"),  # a DNS name with the text of a URI
        names(uris=["sparseps-admin"]),
        names(uris=["spiffe://example.org/workers/"]),
        names(uris=["spiffe://example.org/workers/a/b"]),
        names(uris=["spiffe://example.org/workers/*"]),
        names(uris=["spiffe://example.org/workers/a?b"]),
        names(uris=["SPIFFE://example.org/anybody"]),
        names(uris=["spiffe://example.org/anybody/"]),
    ],
)
def test_no_other_certificate_has_a_role(shown, path, watcher):
    assert read_certificate_roles(path).caller(shown) is None
    with pytest.raises(Rejected) as refused:
        Authenticator(None, watcher, path).authorize(Credentials(names=shown), "GetStatus", Role.READER)
    assert refused.value.reason is ErrorCode.PERMISSION_DENIED
    assert all(name in refused.value.detail for name in shown.dns + shown.uris)
    assert "--certificate-roles" in refused.value.detail


def test_a_line_may_name_the_worker_and_a_shard(path):
    roles = read_certificate_roles(path)
    caller = roles.caller(names("anna.example.org"))
    caller.require_worker("anna")
    with pytest.raises(Rejected, match="certificate is that of another worker"):
        caller.require_worker("bert")
    shard = roles.caller(names("psservice"))
    assert (shard.role, shard.is_shard) == (Role.READER, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nobody\n",
        "admin",
        "king a.example.org",
        "worker a b c",
        "worker a..b",
        "worker *",
        "worker a.*.b",
        "worker *a.example.org",
        "worker spiffe://example.org/*/w",
        "worker spiffe://example.org/w*",
        "worker exa\x00mple",
        "worker é.example.org",
        "worker a\nadmin A",
        "shard a w0",
        f"worker spiffe://{'a' * 2048}",
    ],
)
def test_a_malformed_file_is_refused_by_line(text, tmp_path):
    path = tmp_path / "roles"
    path.write_text(text)
    with pytest.raises(SecurityError, match=str(path)):
        read_certificate_roles(path)
    with pytest.raises(SecurityError, match="nowhere"):
        read_certificate_roles(tmp_path / "nowhere")


def test_a_token_decides_if_one_is_shown(path, tmp_path, watcher):
    tokens = tmp_path / "tokens"
    tokens.write_text("reader r-token\n")
    gate = Authenticator(tokens, watcher, path)
    admin = names("sparseps-admin")
    assert gate.authorize(Credentials(names=admin), "Drain", Role.ADMIN).certificate == "sparseps-admin"
    by_token = gate.authorize(Credentials("Bearer r-token", admin), "GetStatus", Role.READER)
    assert (by_token.role, by_token.certificate) == (Role.READER, "")
    for shown, needed, reason in (
        ("Bearer r-token", Role.ADMIN, ErrorCode.PERMISSION_DENIED),
        ("Bearer wrong", Role.READER, ErrorCode.UNAUTHENTICATED),
    ):
        with pytest.raises(Rejected) as refused:
            gate.authorize(Credentials(shown, admin), "Drain", needed)
        assert refused.value.reason is reason


def test_a_caller_without_a_role_is_told_what_would_give_one(path, tmp_path, watcher):
    tokens = tmp_path / "tokens"
    tokens.write_text("reader r-token\n")
    for gate, has_tokens in ((Authenticator(None, watcher, path), False), (Authenticator(tokens, watcher, path), True)):
        with pytest.raises(Rejected) as refused:
            gate.authorize(Credentials(names=names("a.example.org", "b.example.org")), "Join", Role.WORKER)
        assert "add ROLE a.example.org" in refused.value.detail
        assert refused.value.detail.endswith("or show a token") == has_tokens


def test_a_certificate_that_nobody_names_waits_for_a_look_at_the_file(path, watcher):
    gate = Authenticator(None, watcher, path)
    path.write_text("worker new.example.org\n")

    async def admitted(name):
        return await gate.admit(Credentials(names=names(name)), "Join", Role.WORKER)

    assert asyncio.run(admitted("new.example.org")).role is Role.WORKER
    with pytest.raises(Rejected, match="sparseps-admin"):
        asyncio.run(admitted("sparseps-admin"))
    path.write_text("nonsense")
    watcher.look().result(20)
    assert gate.authorize(Credentials(names=names("new.example.org")), "Join", Role.WORKER)

"""Who may call what, by token; and what a token file may hold."""

import asyncio
import hashlib
import threading

import pytest

from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.rpc import auth
from psservice.rpc.auth import (
    ANONYMOUS_ADMIN,
    Authenticator,
    Credentials,
    read_tokens,
)
from psservice.rpc.caller import Caller, Role
from psservice.rpc.calls import RULES, SERVICE, Call, check
from psservice.rpc.file_watcher import FileWatcher
from psservice.rpc.watched_files import SecurityError

SECONDS = 20.0


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("# who\nworker w-token\nworker bound-token anna\nreader r-token\nadmin a-token  # us\n")
    return path


@pytest.fixture
def watcher():
    watcher = FileWatcher()
    yield watcher
    watcher.close()


def shown(token, scheme="Bearer"):
    return Credentials(f"{scheme} {token}")


def reason_of(call, *arguments):
    with pytest.raises(Rejected) as refused:
        call(*arguments)
    assert "token" in str(refused.value)
    assert not any(word in str(refused.value) for word in ("w-token", "wrong"))
    return refused.value.reason


def test_every_call_of_the_service_needs_a_role():
    assert {*RULES} == {method.name for method in SERVICE.methods}


@pytest.mark.parametrize("rpc", RULES)
@pytest.mark.parametrize(
    ("token", "role"), [("r-token", Role.READER), ("w-token", Role.WORKER), ("a-token", Role.ADMIN)]
)
def test_a_token_allows_what_its_role_may(rpc, token, role, tokens, watcher):
    gate = Authenticator(tokens, watcher)
    needed = RULES[rpc].role
    if role >= needed:
        assert gate.authorize(shown(token), rpc, needed).role is role
    else:
        assert reason_of(gate.authorize, shown(token), rpc, needed) is ErrorCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    "credentials",
    [Credentials(), shown("wrong"), shown(""), shown("w-token", "Basic"), Credentials("w-token"), shown("W-TOKEN")],
)
def test_nobody_gets_in_without_a_known_token(credentials, tokens, watcher):
    assert (
        reason_of(Authenticator(tokens, watcher).authorize, credentials, "GetStatus", Role.READER)
        is ErrorCode.UNAUTHENTICATED
    )


def test_without_a_token_file_everybody_gets_in():
    assert Authenticator(None, FileWatcher()).authorize(Credentials(), "RestoreModel", Role.ADMIN) is ANONYMOUS_ADMIN


def test_a_token_may_be_that_of_one_worker(tokens, watcher):
    caller = Authenticator(tokens, watcher).authorize(shown("bound-token"), "Join", Role.WORKER)
    caller.require_worker("anna")
    assert reason_of(caller.require_worker, "bert") is ErrorCode.PERMISSION_DENIED


def named(rpc, worker_id):
    """The message of a call that names a worker; ``None`` where the call has none."""
    message = getattr(pb, SERVICE.methods_by_name[rpc].input_type.name)()
    holder = getattr(message, "header", message)
    if "identity" not in holder.DESCRIPTOR.fields_by_name:
        return None
    holder.identity.CopyFrom(pb.WorkerIdentity(worker_id=worker_id, incarnation="1"))
    for field, value in (("method", "dgs"), ("step", 1), ("size", 1), ("number", 1), ("version", 1)):
        if field in holder.DESCRIPTOR.fields_by_name:
            setattr(holder, field, value)
    return message


@pytest.mark.parametrize("rpc", [rpc for rpc in RULES if named(rpc, "anna")])
def test_the_token_of_one_worker_makes_no_call_for_another(rpc):
    call = Call(rpc, Caller(Role.WORKER, "anna"))
    check(call, named(rpc, "anna"))
    assert reason_of(check, call, named(rpc, "bert")) is ErrorCode.PERMISSION_DENIED


def test_a_token_may_stand_as_its_hash(tmp_path, watcher):
    path = tmp_path / "tokens"
    path.write_text(f"admin sha256:{hashlib.sha256(b'secret').hexdigest()}")
    assert Authenticator(path, watcher).authorize(shown("secret"), "FinishRun", Role.ADMIN).role is Role.ADMIN


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "admin",
        "king t",
        "worker t w more",
        "admin sha256:12",
        "admin sha256:zz",
        "worker t\nadmin t",
    ],
)
def test_a_malformed_file_is_refused_without_showing_a_token(text, tmp_path):
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(SecurityError, match=str(path)):
        read_tokens(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SecurityError, match="nowhere"):
        Authenticator(tmp_path / "nowhere", FileWatcher())


def test_a_changed_file_is_read_again_and_a_broken_one_leaves_the_old_tokens(tokens, watcher):
    gate = Authenticator(tokens, watcher)
    for change, token in (
        (lambda: None, "w-token"),
        (lambda: tokens.write_text("worker another-token\n"), "another-token"),
        (lambda: tokens.write_text("nonsense"), "another-token"),
        (tokens.unlink, "another-token"),
    ):
        change()
        watcher.look().result(SECONDS)
        assert gate.authorize(shown(token), "Join", Role.WORKER)
    assert reason_of(gate.authorize, shown("w-token"), "Join", Role.WORKER) is ErrorCode.UNAUTHENTICATED


def test_a_token_that_is_not_known_waits_for_a_look_at_the_file(tokens, watcher):
    gate = Authenticator(tokens, watcher)
    tokens.write_text("worker new\n")

    async def admitted(token):
        return await gate.admit(shown(token), "Join", Role.WORKER)

    assert asyncio.run(admitted("new")).role is Role.WORKER
    assert reason_of(asyncio.run, admitted("wrong")) is ErrorCode.UNAUTHENTICATED


def test_few_calls_wait_for_a_file_that_cannot_be_read_and_no_call_without_a_token(tokens, watcher, monkeypatch):
    monkeypatch.setattr(auth, "_MOST_UNKNOWN", 2)
    monkeypatch.setattr(auth, "_LOOK_SECONDS", SECONDS)
    stalled = threading.Event()
    watcher.watch(lambda: stalled.wait(SECONDS))
    gate = Authenticator(tokens, watcher)

    async def scenario():
        waiting = [asyncio.ensure_future(gate.admit(shown("new"), "Join", Role.WORKER)) for _ in range(2)]
        await asyncio.sleep(0)
        for metadata in (shown("new"), Credentials()):
            with pytest.raises(Rejected) as refused:
                await gate.admit(metadata, "Join", Role.WORKER)
            assert refused.value.reason is ErrorCode.UNAUTHENTICATED
        assert not any(each.done() for each in waiting)
        assert (await gate.admit(shown("w-token"), "Join", Role.WORKER)).role is Role.WORKER
        tokens.write_text("worker new\n")
        stalled.set()
        assert [(await each).role for each in waiting] == [Role.WORKER] * 2

    asyncio.run(scenario())


def test_looks_go_on_after_one_that_fails(watcher, caplog):
    def fail():
        raise ValueError("no such thing")

    watcher.watch(fail)
    for _ in range(2):
        watcher.look().result(SECONDS)
    assert "could not be looked at" in caplog.text

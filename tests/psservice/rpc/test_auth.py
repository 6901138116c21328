"""Who may call what, by token; and what a token file may hold."""

import hashlib

import pytest

from pscore.wire.errors import ErrorCode, Rejected
from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.rpc.auth import (
    ANONYMOUS_ADMIN,
    Authenticator,
    Caller,
    Role,
    read_tokens,
)
from psservice.rpc.calls import RULES, SERVICE, Call, check
from psservice.rpc.watched_files import SecurityError


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("# who\nworker w-token\nworker bound-token anna\nreader r-token\nadmin a-token  # us\n")
    return path


def shown(token, scheme="Bearer"):
    return [("user-agent", "test"), ("authorization", f"{scheme} {token}")]


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
def test_a_token_allows_what_its_role_may(rpc, token, role, tokens):
    gate = Authenticator(tokens)
    needed = RULES[rpc].role
    if role >= needed:
        assert gate.authorize(shown(token), rpc, needed).role is role
    else:
        assert reason_of(gate.authorize, shown(token), rpc, needed) is ErrorCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    "metadata",
    [[], shown("wrong"), shown(""), shown("w-token", "Basic"), [("authorization", "w-token")], shown("W-TOKEN")],
)
def test_nobody_gets_in_without_a_known_token(metadata, tokens):
    assert reason_of(Authenticator(tokens).authorize, metadata, "GetStatus", Role.READER) is ErrorCode.UNAUTHENTICATED


def test_without_a_token_file_everybody_gets_in():
    assert Authenticator(None).authorize([], "RestoreModel", Role.ADMIN) is ANONYMOUS_ADMIN


def test_a_token_may_be_that_of_one_worker(tokens):
    caller = Authenticator(tokens).authorize(shown("bound-token"), "Join", Role.WORKER)
    caller.require_worker("anna")
    assert reason_of(caller.require_worker, "bert") is ErrorCode.PERMISSION_DENIED


def named(rpc, worker_id):
    """The message of a call that names a worker; ``None`` where the call has none."""
    message = getattr(pb, SERVICE.methods_by_name[rpc].input_type.name)()
    holder = getattr(message, "header", message)
    if "identity" not in holder.DESCRIPTOR.fields_by_name:
        return None
    holder.identity.CopyFrom(pb.WorkerIdentity(worker_id=worker_id, incarnation="1"))
    for field, value in (("method", "dgs"), ("step", 1), ("size", 1), ("number", 1)):
        if field in holder.DESCRIPTOR.fields_by_name:
            setattr(holder, field, value)
    return message


@pytest.mark.parametrize("rpc", [rpc for rpc in RULES if named(rpc, "anna")])
def test_the_token_of_one_worker_makes_no_call_for_another(rpc):
    call = Call(rpc, Caller(Role.WORKER, "anna"))
    check(call, named(rpc, "anna"))
    assert reason_of(check, call, named(rpc, "bert")) is ErrorCode.PERMISSION_DENIED


def test_a_token_may_stand_as_its_hash(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"admin sha256:{hashlib.sha256(b'secret').hexdigest()}")
    assert Authenticator(path).authorize(shown("secret"), "FinishRun", Role.ADMIN).role is Role.ADMIN


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
        Authenticator(tmp_path / "nowhere")


def test_a_changed_file_is_read_again_and_a_broken_one_leaves_the_old_tokens(tokens):
    now = [0.0]
    gate = Authenticator(tokens, lambda: now[0])
    tokens.write_text("worker another-token\n")
    assert gate.authorize(shown("w-token"), "Join", Role.WORKER)
    now[0] += 2
    assert gate.authorize(shown("another-token"), "Join", Role.WORKER)
    assert reason_of(gate.authorize, shown("w-token"), "Join", Role.WORKER) is ErrorCode.UNAUTHENTICATED
    tokens.write_text("nonsense")
    now[0] += 2
    assert gate.authorize(shown("another-token"), "Join", Role.WORKER)
    tokens.unlink()
    now[0] += 2
    assert gate.authorize(shown("another-token"), "Join", Role.WORKER)

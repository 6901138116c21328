"""TLS, certificates and tokens, with real servers: the right ones train, the others stay outside."""

import json
import re

import grpc
import pytest
import trustme

import psclient
from psclient.errors import AccessError, ConfigurationError, ServerUnreachableError
from psclient.rpc.local_server import LocalServer
from psclient.settings import ClientSettings
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from psservice.cli.main import main
from tests.system.tools import assert_same_parameters, make_data, make_model, train_step, wait_until

LIMITS = {"deadline_seconds": 5, "connect_seconds": 3, "patience_seconds": 10, "dense_below": 0}


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


def issue(authority, directory, name):
    """A certificate for localhost, as files."""
    issued = authority.issue_cert("localhost", "127.0.0.1", common_name=name)
    issued.private_key_pem.write_to_path(directory / f"{name}.key")
    (directory / f"{name}.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    authority.cert_pem.write_to_path(directory / "ca.pem")
    return {"tls_cert": directory / f"{name}.pem", "tls_key": directory / f"{name}.key"}


def train(server, steps=2, worker="w", **settings):
    model = make_model(batch_norm=False)
    with psclient.DGS(
        model.parameters(),
        lr=0.05,
        momentum=0.5,
        density=0.05,
        model=model,
        server=server.server,
        worker=worker,
        settings=ClientSettings(**LIMITS | settings),
    ) as optimizer:
        for _ in range(steps):
            train_step(model, optimizer, *make_data())
        return optimizer.version


def test_training_over_mutual_tls(authority, tmp_path, capsys):
    files = issue(authority, tmp_path, "server")
    with LocalServer(**files, tls_client_ca=tmp_path / "ca.pem") as server:
        mine = {"tls_ca": tmp_path / "ca.pem", **issue(authority, tmp_path, "worker")}
        assert train(server, **mine) == 2
        with pytest.raises(ServerUnreachableError):
            train(server, tls_ca=tmp_path / "ca.pem")  # no certificate
        stranger = tmp_path / "stranger"
        stranger.mkdir()
        other = trustme.CA()
        with pytest.raises(ServerUnreachableError):
            train(server, **(issue(other, stranger, "worker") | {"tls_ca": tmp_path / "ca.pem"}))
        with pytest.raises(ServerUnreachableError, match="PSCLIENT_TLS_CA"):
            train(server, **(mine | {"tls_ca": stranger / "ca.pem"}))  # does not trust the server
        with pytest.raises(ServerUnreachableError):
            train(server)  # plaintext
        assert main(["status", server.server, "--tls-ca", str(mine["tls_ca"]), "--tls-server-name", "elsewhere"]) == 1
        assert "PSCLIENT_TLS_SERVER_NAME" in capsys.readouterr().err


def test_certificates_are_read_again_when_they_change(authority, tmp_path):
    files = issue(authority, tmp_path, "server")
    with LocalServer(**files) as server:
        assert train(server, tls_ca=tmp_path / "ca.pem") == 2
        other = trustme.CA()
        issue(other, tmp_path, "server")  # and another ca.pem
        assert train(server, tls_ca=tmp_path / "ca.pem") == 4


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(
        "worker secret-of-workers\nworker secret-of-anna anna\nreader secret-of-readers\nadmin secret-of-admins\n"
    )
    return path


def test_tokens_decide_who_does_what(tokens, tmp_path, monkeypatch, capsys):
    log = tmp_path / "log"
    with log.open("w") as stream, LocalServer(tokens=tokens, log_to=stream, log_level="debug") as server:
        assert train(server, token="secret-of-workers") == 2
        assert train(server, worker="anna", token="secret-of-anna") == 4
        for wrong in ({}, {"token": "secret-of-nobody"}, {"token": "secret-of-readers"}, {"token": "secret-of-anna"}):
            with pytest.raises(AccessError) as refused:
                train(server, **wrong)
            assert "secret" not in str(refused.value)
        monkeypatch.setenv("PSCLIENT_TOKEN", "secret-of-readers")
        assert psclient.download(server.server)
        assert main(["status", server.addresses[0], "--output=json"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["version"] == 4
        for command in (
            ["finish"],
            ["drain"],
            ["evict", "anna"],
            ["checkpoint", "create"],
            ["checkpoint", "export", "any", "--to", str(tmp_path / "store")],
            ["restore", "--version", "1"],
        ):
            assert main([*command, server.addresses[0]]) == 3, command
            assert "PERMISSION_DENIED" in capsys.readouterr().err
        monkeypatch.delenv("PSCLIENT_TOKEN")
        (tmp_path / "admin").write_text("secret-of-admins\n")
        assert main(["finish", server.addresses[0], "--token-file", str(tmp_path / "admin")]) == 0
    assert "secret" not in log.read_text()


def test_a_token_that_is_withdrawn_ends_training_and_one_given_again_continues_it(tokens, tmp_path, monkeypatch):
    held = tmp_path / "held"
    held.write_text("secret-of-workers")
    with LocalServer(tokens=tokens, down_mode="exact") as server:
        model = make_model(batch_norm=False)
        settings = ClientSettings(**LIMITS | {"token_file": held})
        with psclient.GradientDropping(
            model.parameters(), lr=0.05, density=0.05, model=model, server=server.server, settings=settings
        ) as optimizer:
            train_step(model, optimizer, *make_data())
            before = tokens.read_text()
            tokens.write_text("admin secret-of-admins\n")

            def shut_out() -> bool:
                try:
                    train_step(model, optimizer, *make_data())
                except AccessError:
                    return True
                return False

            wait_until(shut_out)
            tokens.write_text(before)

            def let_in() -> bool:
                try:
                    train_step(model, optimizer, *make_data())
                except AccessError:
                    return False
                return True

            wait_until(let_in)
            monkeypatch.setenv("PSCLIENT_TOKEN", "secret-of-readers")
            assert_same_parameters(model, server.server)


def test_every_call_is_refused_without_a_token(tokens):
    with LocalServer(tokens=tokens) as server, grpc.insecure_channel(server.addresses[0]) as channel:
        stub = ParameterServerServiceStub(channel)
        for method in pb.DESCRIPTOR.services_by_name["ParameterServerService"].methods:
            request = getattr(pb, method.input_type.name)()
            call = getattr(stub, method.name)
            wait = list if method.server_streaming else lambda answer: answer
            with pytest.raises(grpc.RpcError) as refused:
                wait(call(iter([request]) if method.client_streaming else request, timeout=10))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, method.name


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"listen": "0.0.0.0:0"}, "--insecure"),
        ({"listen": "0.0.0.0:0", "tokens": "T"}, "in plaintext"),
        ({"listen": "0.0.0.0:0", "tokens": "T", "insecure": True}, "in plaintext"),
        ({"listen": "0.0.0.0:0", "tls_cert": "C", "tls_key": "K"}, "--insecure"),
        ({"tls_cert": "C"}, "--tls-key"),
        ({"tls_client_ca": "C"}, "needs TLS"),
        ({"tls_cert": "missing", "tls_key": "missing"}, "cannot read"),
        ({"tokens": "missing"}, "cannot read"),
    ],
)
def test_what_would_leave_a_door_open_is_refused_at_the_start(settings, why, authority, tokens, tmp_path):
    files = issue(authority, tmp_path, "server")
    real = {"T": tokens, "C": files["tls_cert"], "K": files["tls_key"]}
    log = tmp_path / "log"
    with log.open("w") as stream, pytest.raises(ConfigurationError):
        LocalServer(log_to=stream, **{name: real.get(str(value), value) for name, value in settings.items()})
    assert re.search(why, log.read_text())


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"token": "t"}, "in plaintext"),
        ({"tls_cert": "C"}, "needs TLS"),
        ({"tls_ca": "missing"}, "cannot read"),
        ({"token_file": "missing"}, "cannot read"),
        ({"tls_ca": "C", "tls_cert": "C"}, "together"),
    ],
)
def test_a_worker_does_not_show_its_token_to_the_network(settings, why, authority, tmp_path):
    files = issue(authority, tmp_path, "server")
    settings = {name: files["tls_cert"] if value == "C" else value for name, value in settings.items()}
    with pytest.raises(ConfigurationError, match=why):
        psclient.download("parameter-server.example:50051", ClientSettings(**settings), patience_seconds=1)
    assert "'t'" not in repr(ClientSettings(**settings))

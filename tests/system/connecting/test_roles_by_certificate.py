"""Mutual TLS without tokens: the names in a caller's certificate decide what it may do, at real servers."""

import json

import grpc
import pytest
import trustme

import psclient
from psclient import LocalServer
from psclient.errors import AccessError
from psclient.settings import ClientSettings
from pscore.net.channels import Security, open_channel
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from psservice.cli.main import main
from psservice.process.server import Server
from psservice.settings import ServerSettings, SettingsError, load
from tests.certificates import dns, ip, uri, write
from tests.system.operating.asking import metric
from tests.system.tools import make_data, make_model, train_step, wait_until

AUTHORITY = trustme.CA()
ROLES = """\
admin  sparseps-admin
shard  psservice
worker *.workers.example.org
worker spiffe://example.org/anna anna
reader sparseps-reader
"""
LIMITS = {"deadline_seconds": 5, "connect_seconds": 3, "patience_seconds": 10, "dense_below": 0}


@pytest.fixture
def files(tmp_path):
    """The server's settings, with a file of roles."""
    (tmp_path / "roles").write_text(ROLES)
    server = write(AUTHORITY, tmp_path, "server", dns("psservice"), dns("localhost"))
    return {
        "tls_cert": server["tls_cert"],
        "tls_key": server["tls_key"],
        "tls_client_ca": server["tls_ca"],
        "certificate_roles": tmp_path / "roles",
    }


def caller(tmp_path, *names, **options):
    return write(AUTHORITY, tmp_path / "callers", "caller", *names, **options) | {"tls_server_name": "localhost"}


def train(server, mine, worker="w", steps=2):
    model = make_model(batch_norm=False)
    settings = ClientSettings(**LIMITS | mine)
    options = {"lr": 0.05, "density": 0.05, "model": model, "server": server.server, "worker": worker}
    with psclient.GradientDropping(model.parameters(), settings=settings, **options) as optimizer:
        for _ in range(steps):
            train_step(model, optimizer, *make_data())
        return optimizer.version


def operate(server, mine, *words):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in mine.items()]
    return main([*words, *server.addresses, *flags])


@pytest.mark.parametrize("shards", [1, 2])
def test_a_certificate_decides_who_does_what(shards, files, tmp_path, capsys):
    with LocalServer(shards, **files) as server:
        worker = caller(tmp_path, dns("w0.workers.example.org"))
        assert train(server, worker) == 2
        for words in (["finish"], ["drain"], ["evict", "w"], ["checkpoint", "create"], ["restore", "--version", "1"]):
            allowed = words == ["finish"]  # a worker may end its run
            if not allowed:
                assert operate(server, worker, *words) == 3, words
                assert "w0.workers.example.org has less" in capsys.readouterr().err
        assert train(server, caller(tmp_path, uri("spiffe://example.org/anna")), "anna") == 4
        with pytest.raises(AccessError, match="another worker"):
            train(server, caller(tmp_path, uri("spiffe://example.org/anna")), "bert")
        reader = caller(tmp_path, dns("sparseps-reader"))
        assert psclient.download(server.server, ClientSettings(**LIMITS | reader))
        with pytest.raises(AccessError, match="needs the role worker"):
            train(server, reader)
        with pytest.raises(AccessError, match=r"stranger\.example\.org.*--certificate-roles|--certificate-roles.*stra"):
            train(server, caller(tmp_path, dns("stranger.example.org")))
        with pytest.raises(AccessError, match="no subject alternative name"):
            train(server, caller(tmp_path, common_name="sparseps-admin"))
        admin = caller(tmp_path, dns("sparseps-admin"))
        capsys.readouterr()
        assert operate(server, admin, "drain") == 0
        assert operate(server, admin, "drain", "--undo") == 0
        if shards > 1:  # over the socket of this host, without a token or a certificate
            assert metric(server.metrics_addresses[1], "psservice_follows_coordinator") == 1


@pytest.mark.parametrize("has_address", [True, False])
def test_shards_on_several_hosts_follow_shard_0_by_their_certificate(has_address, files, tmp_path, caplog):
    """Also by a certificate for all shards that has none of their addresses, if they are told its name."""
    place = {"listen": "127.0.0.1:0", "num_shards": 2, "health_listen": "", "metrics_listen": ""}
    addresses = [ip("127.0.0.1")] if has_address else []
    ours = write(AUTHORITY, tmp_path, "server", dns("psservice"), uri("spiffe://x/y"), *addresses)
    secured = files | {"tls_cert": ours["tls_cert"], "tls_key": ours["tls_key"]}
    name = "" if has_address else "psservice"
    first = Server(ServerSettings(**secured, **place, run_id="the-run"))
    second = Server(ServerSettings(**secured, **place, shard_index=1, coordinator=first.address, tls_server_name=name))
    try:
        wait_until(lambda: second.shard.run.run_id == "the-run")
        for name, code in (("psservice", None), ("sparseps-reader", grpc.StatusCode.PERMISSION_DENIED)):
            mine = caller(tmp_path, dns(name))
            security = Security(mine["tls_ca"], mine["tls_cert"], mine["tls_key"], "psservice")
            part = pb.ShardVersion(generation=1, version=1, digest=bytes(16))
            request = pb.FollowRunRequest(num_shards=2, shard_index=1, cut=1, version=part)
            with open_channel(first.address, security, (("grpc.use_local_subchannel_pool", 1),)) as channel:
                stub = ParameterServerServiceStub(channel)
                if code is None:
                    assert stub.FollowRun(request, timeout=20).news.run_id == "the-run"
                    continue
                with pytest.raises(grpc.RpcError) as refused:
                    stub.FollowRun(request, timeout=20)
                assert refused.value.code() is code
                assert "only shards" in refused.value.details()
    finally:
        second.stop()
        first.stop()


def test_a_line_that_is_withdrawn_ends_what_runs_and_one_that_comes_admits(files, tmp_path):
    """Also on a stream that stays open: each of its requests asks again."""
    mine = caller(tmp_path, dns("w0.workers.example.org"))
    with LocalServer(**files, down_mode="exact") as server:
        model = make_model(batch_norm=False)
        settings = ClientSettings(**LIMITS | mine)
        options = {"lr": 0.05, "density": 0.05, "model": model, "server": server.server, "settings": settings}
        with psclient.GradientDropping(model.parameters(), **options) as optimizer:

            def works():
                try:
                    train_step(model, optimizer, *make_data())
                except AccessError:
                    return False
                return True

            assert works()
            files["certificate_roles"].write_text("admin sparseps-admin\n")
            wait_until(lambda: not works())
            files["certificate_roles"].write_text(ROLES)
            wait_until(works)


def test_tokens_beside_certificates(files, tmp_path, monkeypatch, capsys):
    (tmp_path / "tokens").write_text("admin an-admins-token\n")
    with LocalServer(**files, tokens=tmp_path / "tokens") as server:
        mine = caller(tmp_path, dns("sparseps-reader"))
        assert operate(server, mine, "drain") == 3
        capsys.readouterr()
        monkeypatch.setenv("PSCLIENT_TOKEN", "an-admins-token")
        assert operate(server, mine, "drain") == 0
        monkeypatch.setenv("PSCLIENT_TOKEN", "unknown")
        assert operate(server, caller(tmp_path, dns("sparseps-admin")), "drain", "--undo") == 3
        assert "UNAUTHENTICATED" in capsys.readouterr().err


def test_roles_of_certificates_need_certificates():
    with pytest.raises(SettingsError, match="--tls-client-ca"):
        load(["--certificate-roles", "roles"])


def test_reflection_and_the_audit_log_know_certificates(files, tmp_path):
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    audit_log = tmp_path / "audit"
    with LocalServer(**files, reflection="on", audit_log=audit_log) as server:
        for name, code in (("sparseps-reader", None), ("nobody.example.org", grpc.StatusCode.PERMISSION_DENIED)):
            mine = caller(tmp_path, dns(name))
            security = Security(mine["tls_ca"], mine["tls_cert"], mine["tls_key"], "localhost")
            with open_channel(server.addresses[0], security, (("grpc.use_local_subchannel_pool", 1),)) as channel:
                asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
                answers = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked, timeout=20)
                if code is None:
                    assert next(answers).list_services_response.service
                else:
                    with pytest.raises(grpc.RpcError) as refused:
                        next(answers)
                    assert refused.value.code() is code
    (line,) = map(json.loads, audit_log.read_text().splitlines())
    assert (line["certificate"], line["reason"]) == ("nobody.example.org", "PERMISSION_DENIED")

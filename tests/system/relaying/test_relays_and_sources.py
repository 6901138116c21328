"""A relay whose source asks for TLS and tokens, is slow, is the relay itself, or answers nonsense."""

import json
import subprocess
import sys
from concurrent import futures
from contextlib import ExitStack, contextmanager

import grpc
import pytest
import torch
import trustme

from psclient import DirectorySink, Follower, LocalServer, Publisher
from psclient.settings import ClientSettings
from psservice.cli.main import main
from tests.certificates import dns, ip, write
from tests.system.following.following_tools import READING, SECONDS, training
from tests.system.line import Line
from tests.system.publishing.publishing_tools import QUIET, change, odd_tensors
from tests.system.tools import wait_until

pytestmark = pytest.mark.timeout(180)

ROLES = ("worker", "reader", "admin")


@pytest.fixture(scope="module")
def authorities():
    return {name: trustme.CA() for name in ("source", "relay")}


def secured(authority, directory):
    """Settings of a server with a certificate and tokens, and those of a client for each role."""
    directory.mkdir()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_pem.write_to_path(directory / "key.pem")
    (directory / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    authority.cert_pem.write_to_path(directory / "ca.pem")
    (directory / "tokens").write_text("".join(f"{role} {directory.name}-{role}\n" for role in ROLES))
    for role in ROLES:
        (directory / role).write_text(f"{directory.name}-{role}\n")
    server = {"tls_cert": directory / "cert.pem", "tls_key": directory / "key.pem", "tokens": directory / "tokens"}
    client = {role: {"tls_ca": directory / "ca.pem", "token_file": directory / role} for role in ROLES}
    return server, client


def settings_of(client, **others):
    return ClientSettings(server="local", deadline_seconds=5, patience_seconds=10, **client, **others)


def status_of(server, capsys, *options):
    assert main(["status", "--output=json", *server.addresses, *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_relay_of_a_secured_source_has_secured_readers(authorities, tmp_path, capsys):
    source_settings, to_source = secured(authorities["source"], tmp_path / "source")
    relay_settings, to_relay = secured(authorities["relay"], tmp_path / "relay")
    tensors = odd_tensors()
    shared = {"source_ca": tmp_path / "source" / "ca.pem", "cut_seconds": 0.02}
    with (
        LocalServer(shards=2, cut_seconds=0.02, **source_settings) as source,
        Publisher(source, settings=settings_of(to_source["worker"])) as publisher,
        LocalServer(
            shards=2,
            relay_of=source.server,
            source_token_file=tmp_path / "source" / "reader",
            **shared,
            **relay_settings,
            coordinator_ca=tmp_path / "relay" / "ca.pem",
        ) as relay,
    ):
        publisher.publish(tensors)
        with Follower(relay, DirectorySink(tmp_path / "model"), settings_of(to_relay["reader"])) as follower:
            for version in range(3):
                if version:
                    change(tensors, version)
                    publisher.publish(tensors)
                follower.wait_for(version, SECONDS)
        secure = [*relay.addresses, "--tls-ca", str(tmp_path / "relay" / "ca.pem")]
        assert main(["status", *secure]) == 3, "without a token"
        assert "give the caller a token" in capsys.readouterr().err
        for role, reason in (("reader", "PERMISSION_DENIED"), ("admin", "relay")):
            assert main(["finish", *secure, "--token-file", str(tmp_path / "relay" / role)]) == 3
            assert reason in capsys.readouterr().err


@pytest.mark.long
def test_a_relay_and_its_readers_are_known_by_their_certificates(authorities, tmp_path, capsys):
    """Source and relay have roles of certificates and no tokens; so has each of their shards."""
    authority = authorities["source"]
    (tmp_path / "roles").write_text("reader a-relay\nreader a-reader\nworker a-publisher\n")
    server = write(authority, tmp_path, "server", dns("localhost"), ip("127.0.0.1"))
    asks = {"tls_cert": server["tls_cert"], "tls_key": server["tls_key"], "tls_client_ca": server["tls_ca"]}
    asks["certificate_roles"] = tmp_path / "roles"
    named = {"tls_server_name": "localhost"}

    def shows(name):
        return write(authority, tmp_path, name, dns(name))

    relays = {setting.replace("tls", "source"): path for setting, path in shows("a-relay").items()}
    tensors, log = odd_tensors(), tmp_path / "log"
    with (
        LocalServer(shards=2, cut_seconds=0.02, **asks) as source,
        Publisher(source, settings=settings_of(shows("a-publisher"), **named)) as publisher,
        log.open("w") as stream,
        LocalServer(shards=2, cut_seconds=0.02, relay_of=source.server, log_to=stream, **asks, **relays) as relay,
    ):
        publisher.publish(tensors)
        reader = settings_of(shows("a-reader"), **named)
        with Follower(relay, DirectorySink(tmp_path / "model"), reader) as follower:
            follower.wait_for(0, SECONDS)
            change(tensors, 1)
            publisher.publish(tensors)
            follower.wait_for(1, SECONDS)
        (tmp_path / "roles").write_text("reader a-reader\nworker a-publisher\n")  # no line for the relay
        wait_until(lambda: "--certificate-roles" in log.read_text(), SECONDS)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"source_ca": "ca.pem", "source_token_file": "wrong"}, "give the caller a token"),
        ({"source_ca": "ca.pem"}, "give the caller a token"),
        ({"source_token_file": "reader"}, "--source-ca"),
    ],
    ids=["a token that the source does not have", "no token", "no TLS"],
)
def test_a_relay_that_its_source_refuses_says_what_to_do(given, told, authorities, tmp_path, capsys):
    source_settings, _ = secured(authorities["source"], tmp_path / "source")
    (tmp_path / "source" / "wrong").write_text("nobody's\n")
    log = tmp_path / "log"
    with (
        LocalServer(shards=2, coordinator_ca=tmp_path / "source" / "ca.pem", **source_settings) as source,
        log.open("w") as stream,
        LocalServer(
            shards=2,
            relay_of=source.server,
            log_to=stream,
            **{name: tmp_path / "source" / file for name, file in given.items()},
        ) as relay,
    ):
        wait_until(lambda: told in log.read_text(), SECONDS)
        status, _ = status_of(relay, capsys)
        assert told in status["relay"]["error"]
        assert main(["status", *relay.addresses]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"of {source.server}, which has not been followed for" in shown
    assert "Traceback" not in log.read_text()
    assert log.read_text().count("cannot be followed") == 1


@contextmanager
def garbage():
    """A server that answers every call with bytes that are no message; yields its address."""

    class Answers(grpc.GenericRpcHandler):
        def service(self, details):
            return grpc.unary_unary_rpc_method_handler(lambda request, context: b"\xff\xfe none")

    server = grpc.server(futures.ThreadPoolExecutor(4), handlers=(Answers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0)


@pytest.mark.long
def test_a_source_that_answers_nonsense_is_logged_once_with_a_next_step(tmp_path, capsys):
    log = tmp_path / "log"
    with (
        garbage() as address,
        log.open("w") as stream,
        LocalServer(
            shards=2, relay_of=f"{address},{address.replace('127.0.0.1', 'localhost')}", log_to=stream
        ) as relay,
    ):
        wait_until(lambda: status_of(relay, capsys)[0]["relay"]["lost_seconds"] > 3, SECONDS)
    text = log.read_text()
    assert text.count("Correct --of, or upgrade") == 1
    assert "Traceback" not in text


def test_a_relay_of_itself_is_refused():
    command = [sys.executable, "-m", "psservice", "relay", "--of", "localhost:50151", "--listen", "127.0.0.1:50151"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "this relay itself" in refused.stderr


@pytest.mark.long
def test_a_ring_of_two_relays_is_refused_by_both(tmp_path, capsys):
    tensors = odd_tensors()
    folders = [{"data_dir": tmp_path / name, "cut_seconds": 0.02} for name in ("first", "second")]
    with LocalServer(cut_seconds=0.02) as source, Publisher(source, settings=QUIET) as publisher:
        publisher.publish(tensors)
        with (
            LocalServer(relay_of=source.server, **folders[0]) as first,
            LocalServer(relay_of=first.server, **folders[1]) as second,
            Follower(second, DirectorySink(tmp_path / "model"), READING) as follower,
        ):
            follower.wait_for(0, SECONDS)
    log = tmp_path / "log"
    with log.open("w") as stream, ExitStack() as stack:
        rings = [
            stack.enter_context(LocalServer(listen=here, relay_of=to, log_to=stream, **folder))
            for here, to, folder in (
                (first.server, second.server, folders[0]),
                (second.server, first.server, folders[1]),
            )
        ]
        for relay in rings:
            wait_until(lambda relay=relay: "RELAY_RING" in status_of(relay, capsys)[0]["relay"]["error"], SECONDS)
        with Follower(rings[1], DirectorySink(tmp_path / "late"), READING) as follower:
            follower.wait_for(0, SECONDS)
    assert "leads back to this relay itself" in log.read_text()


@pytest.mark.long
def test_a_first_reader_of_a_type_gets_what_is_here_while_a_shard_fetches(tmp_path, capsys):
    with ExitStack() as stack:
        source = stack.enter_context(LocalServer(shards=2, cut_seconds=0.02))
        run = stack.enter_context(training(source))
        lines = [stack.enter_context(Line(address)) for address in source.addresses]
        relay = stack.enter_context(
            LocalServer(shards=2, cut_seconds=0.02, relay_of=",".join(line.address for line in lines))
        )
        wide = stack.enter_context(Follower(relay, DirectorySink(tmp_path / "wide"), READING))
        wide.wait_for(0, SECONDS)
        lines[1].stop_at("down", lines[1].down)
        here = run.steps(3)
        wait_until(lambda: status_of(relay, capsys)[1]["relay"]["behind_seconds"] > 0.5, SECONDS)
        with Follower(relay, DirectorySink(tmp_path / "narrow", torch.bfloat16), READING) as narrow:
            narrow.wait_for(0, SECONDS)
            assert {each.version for each in narrow.cut.shards} != {here}
        assert main(["top", "--once", "--interval-seconds", "0.1", *relay.addresses]) == 0
        assert "shard 1 relays" in capsys.readouterr().out
        lines[1].go_on()
        wide.wait_for(here, SECONDS)

"""Certificates of a running server: what is wrong with them, or soon will be, is said in its log and its metrics."""

import datetime
import json

import grpc
import pytest
import trustme

import psclient
from psclient import LocalServer
from psclient.errors import ConfigurationError, HandshakeError
from psclient.settings import ClientSettings
from pscore.net.channels import Security, open_channel
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from tests.system.operating.asking import metric
from tests.system.tools import wait_until

AUTHORITY = trustme.CA()


def in_days(days):
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0) + datetime.timedelta(days=days)


def issue(directory, name, end):
    """Write a certificate for this machine that is valid until ``end``; return the server's settings for it."""
    issued = AUTHORITY.issue_cert("localhost", "127.0.0.1", not_before=in_days(-100), not_after=end)
    directory.mkdir(exist_ok=True)
    AUTHORITY.cert_pem.write_to_path(directory / "ca.pem")
    put(directory / f"{name}.key", issued.private_key_pem.bytes())
    put(directory / f"{name}.pem", b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    return {"tls_cert": directory / f"{name}.pem", "tls_key": directory / f"{name}.key"}


def put(path, data):
    """Write a file in one step, readable by its owner."""
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.chmod(0o600)
    new.rename(path)


class Logged:
    """A server's log, a JSON object a line."""

    def __init__(self, path):
        self._path = path
        self.stream = path.open("w")

    def lines(self):
        return [json.loads(line) for line in self._path.read_text().splitlines()]

    def of(self, *words, level=None):
        """The lines that have all these words."""
        return [
            line
            for line in self.lines()
            if all(word in json.dumps(line) for word in words) and level in (None, line["level"])
        ]


@pytest.fixture
def log(tmp_path):
    made = Logged(tmp_path / "log")
    yield made
    made.stream.close()


def serve(log, files, **settings):
    return LocalServer(log_to=log.stream, log_format="json", log_level="info", **files, **settings)


def expiry(server, which):
    return metric(server.metrics_addresses[0], f'psservice_certificate_expiry_unix_seconds{{certificate="{which}"}}')


def reach(server, directory):
    security = Security(ca=directory / "ca.pem")
    with open_channel(server.addresses[0], security, (("grpc.use_local_subchannel_pool", 1),)) as channel:
        return ParameterServerServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=10)


def test_an_expired_certificate_is_told_of_from_the_start_and_refused_for_that_alone(tmp_path, log):
    ended = in_days(-1)
    with serve(log, issue(tmp_path, "server", ended)) as server:
        assert log.of("expired", "server.pem", ended.strftime("%Y-%m-%d"), level="ERROR")
        assert expiry(server, "tls_cert") == ended.timestamp()
        limits = {"deadline_seconds": 3, "connect_seconds": 2, "patience_seconds": 2}
        with pytest.raises(HandshakeError) as refused:
            psclient.download(server.server, ClientSettings(tls_ca=tmp_path / "ca.pem", **limits), patience_seconds=2)
        assert "certificate has expired" in str(refused.value)
        assert "descend" not in str(refused.value)


def test_a_certificate_that_ends_soon_is_told_of(tmp_path, log):
    soon = in_days(3)
    files = issue(tmp_path, "server", in_days(300))
    with serve(log, files, tls_client_ca=tmp_path / "ca.pem") as server:
        assert not log.of("certificate", level="WARNING")
        assert expiry(server, "tls_cert") > in_days(299).timestamp()
        assert expiry(server, "tls_client_ca") > in_days(365).timestamp()
        issue(tmp_path, "server", soon)
        wait_until(lambda: log.of("expires", "server.pem", soon.strftime("%Y-%m-%d"), level="WARNING"))  # nobody calls
        assert expiry(server, "tls_cert") == soon.timestamp()
        issue(tmp_path, "server", in_days(-2))
        wait_until(lambda: log.of("expired", "server.pem", level="ERROR"))


def test_a_server_without_tls_has_no_series_for_certificates(log):
    with serve(log, {}) as server:
        assert expiry(server, "tls_cert") == 0.0


def test_a_pair_that_does_not_match_is_an_error_and_the_one_before_stays(tmp_path, log):
    files = issue(tmp_path, "server", in_days(100))
    issue(tmp_path, "other", in_days(200))
    with serve(log, files) as server:
        put(tmp_path / "server.key", (tmp_path / "other.key").read_bytes())
        wait_until(lambda: log.of("certificates have changed and cannot be used; the old ones stay", level="ERROR"))
        assert log.of("server.pem", "server.key", "belong together", level="ERROR")
        assert reach(server, tmp_path)
        assert reach(server, tmp_path)
        assert not log.of("read again")
        assert expiry(server, "tls_cert") < in_days(150).timestamp()
        put(tmp_path / "server.pem", (tmp_path / "other.pem").read_bytes())
        wait_until(lambda: log.of("certificates read again"))
        assert reach(server, tmp_path)
        assert expiry(server, "tls_cert") > in_days(150).timestamp()
        assert len(log.of(level="ERROR")) == 1


def test_a_pair_that_does_not_match_at_the_start_is_named(tmp_path, log):
    issue(tmp_path, "other", in_days(200))
    files = issue(tmp_path, "server", in_days(100)) | {"tls_key": tmp_path / "other.key"}
    with pytest.raises(ConfigurationError):
        serve(log, files)
    said = (tmp_path / "log").read_text()
    assert "server.pem" in said
    assert "other.key" in said
    assert "another server" not in said


def test_handshakes_are_counted_so_that_those_without_a_call_show(tmp_path, log):
    with serve(log, issue(tmp_path, "server", in_days(100))) as server:
        before = metric(server.metrics_addresses[0], "psservice_handshakes_total")
        with grpc.insecure_channel(server.addresses[0]) as channel, pytest.raises(grpc.RpcError):
            ParameterServerServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=10)
        assert metric(server.metrics_addresses[0], "psservice_handshakes_total") > before

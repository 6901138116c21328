"""The server's certificate files: what they may hold, and when the log tells of their end."""

import datetime
import logging

import pytest
import trustme

from psservice.rpc.certificates import SOON_SECONDS, ServerCertificates
from psservice.rpc.watched_files import SecurityError

DAY = 86400.0
END = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture
def files(tmp_path):
    issued = trustme.CA().issue_cert("localhost", not_before=datetime.datetime(2020, 1, 1), not_after=END)
    (tmp_path / "key").write_bytes(issued.private_key_pem.bytes())
    (tmp_path / "cert").write_bytes(issued.cert_chain_pems[0].bytes())
    (tmp_path / "key").chmod(0o600)
    return tmp_path


@pytest.mark.parametrize(
    ("cert", "key", "why"),
    [
        ("text", "key", "text is not a PEM file"),
        ("missing", "key", "cannot read .*missing"),
        ("cert", "cert", "cert holds no key"),
        ("key", "key", "key holds no certificate"),
        ("cert", "other", "cert and .*other do not belong together"),
    ],
)
def test_files_that_cannot_be_used_are_named(files, cert, key, why):
    (files / "text").write_text("hello")
    trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(files / "other")
    with pytest.raises(SecurityError, match=why):
        ServerCertificates(files / cert, files / key)


def test_a_chain_ends_with_its_first_certificate(files):
    (files / "both").write_bytes((files / "cert").read_bytes() + trustme.CA().cert_pem.bytes())
    assert ServerCertificates(files / "both", files / "key").ends == {"tls_cert": END.timestamp()}


def test_the_log_tells_of_an_end_once_a_day_from_two_weeks_before(files, caplog):
    caplog.set_level(logging.INFO)
    now = [0.0]
    certificates = ServerCertificates(files / "cert", files / "key", clock=lambda: now[0])

    def said_at(seconds_before_the_end):
        now[0] = END.timestamp() - seconds_before_the_end
        caplog.clear()
        certificates.check()
        certificates.check()
        return [(record.levelname, record.getMessage()) for record in caplog.records]

    soon = [("WARNING", "a certificate expires soon")]
    assert said_at(SOON_SECONDS + 1) == []
    assert said_at(SOON_SECONDS - 1) == soon
    assert said_at(SOON_SECONDS - DAY / 2) == []
    assert said_at(SOON_SECONDS - 2 * DAY) == soon
    assert said_at(DAY / 4) == soon
    assert said_at(0) == [("ERROR", "a certificate has expired: handshakes fail")]
    assert said_at(-DAY / 2) == []
    assert said_at(-2 * DAY) == [("ERROR", "a certificate has expired: handshakes fail")]

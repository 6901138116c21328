"""What is no certificate is said before the first call, by name."""

from pathlib import Path

import grpc
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from pscore.net.channels import ChannelError, Security, open_channel, warn_of_readers
from psservice.cli.main import main
from psservice.rpc.auth import Authenticator
from psservice.rpc.certificates import ServerCertificates
from psservice.rpc.file_watcher import FileWatcher


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    directory, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    authority.cert_pem.write_to_path(directory / "ca.pem")
    for name in ("worker", "other"):
        issued = authority.issue_cert("localhost")
        issued.private_key_pem.write_to_path(directory / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(directory / f"{name}.pem")
    key = serialization.load_pem_private_key((directory / "worker.key").read_bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"a word"),
    )
    (directory / "locked.key").write_bytes(locked)
    (directory / "empty.pem").touch()
    (directory / "text.pem").write_text("no certificate")
    (directory / "binary.pem").write_bytes(bytes(range(256)))
    return directory


def test_a_secret_that_everybody_can_read_is_warned_of_once(files, tmp_path, caplog):
    token, tokens = tmp_path / "token", tmp_path / "tokens"
    token.write_text("a-token")
    tokens.write_text("admin a-token")
    key = tmp_path / "key"
    key.write_bytes((files / "worker.key").read_bytes())
    secured = Security(ca=files / "ca.pem", cert=files / "worker.pem", key=key)

    watcher = FileWatcher()

    def use_all():
        for security in (Security(token_file=token), secured):
            open_channel("localhost:1", security).close()
        Authenticator(tokens, watcher)
        ServerCertificates(files / "worker.pem", key, None)

    for path in (token, tokens, key):
        path.chmod(0o640)
    use_all()
    assert caplog.text == ""
    warn_of_readers.cache_clear()
    for path in (token, tokens, key):
        path.chmod(0o644)
    use_all()
    use_all()
    watcher.close()
    assert [each.getMessage().count("every user of this machine") for each in caplog.records] == [1, 1, 1]
    assert all(str(path) in caplog.text for path in (token, tokens, key))


def test_files_that_belong_together_open_a_channel(files):
    security = Security(ca=files / "ca.pem", cert=files / "worker.pem", key=files / "worker.key")
    with open_channel("localhost:1", security) as channel:
        assert isinstance(channel, grpc.Channel)


@pytest.mark.parametrize("name", ["empty.pem", "text.pem", "binary.pem", "worker.key"])
def test_a_ca_that_is_none_is_named(files, name):
    with pytest.raises(ChannelError, match=rf"{name} holds no certificate of a CA in PEM form \(--tls-ca"):
        open_channel("localhost:1", Security(ca=files / name))


@pytest.mark.parametrize(
    ("cert", "key"),
    [("worker.pem", "other.key"), ("worker.pem", "locked.key"), ("text.pem", "worker.key"), ("worker.pem", "ca.pem")],
)
def test_a_certificate_and_a_key_that_do_not_fit_are_named(files, cert, key):
    with pytest.raises(ChannelError, match=rf"{cert} and .*{key} are not a certificate and its key"):
        open_channel("localhost:1", Security(ca=files / "ca.pem", cert=files / cert, key=files / key))


def test_an_operator_is_told_that_the_command_was_wrong(files, capsys):
    assert main(["status", "--tls-ca", str(files / "text.pem"), "127.0.0.1:1"]) == 2
    assert "text.pem holds no certificate" in capsys.readouterr().err

"""Another authority takes over while a worker trains: first both are trusted, then its certificates are used."""

import pytest
import trustme

import psclient
from psclient import LocalServer
from psclient.errors import ServerUnreachableError
from psclient.settings import ClientSettings
from tests.certificates import dns, pem_of
from tests.system.tools import make_data, make_model, train_step

LIMITS = {"deadline_seconds": 5, "connect_seconds": 20, "patience_seconds": 60, "dense_below": 0}


def put(path, data):
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.chmod(0o600)
    new.rename(path)


def put_certificate(directory, authority, name):
    certificate, key = pem_of(authority, dns(name), dns("localhost"))
    put(directory / f"{name}.key", key)
    put(directory / f"{name}.pem", certificate)


def test_an_authority_is_replaced_without_a_failed_step(tmp_path):
    """With a broken connection after each change, so that each handshake has only what the files then have."""
    old, new = trustme.CA(), trustme.CA()
    (tmp_path / "roles").write_text("worker a-worker\n")

    def trust(*authorities):
        put(tmp_path / "ca.pem", b"".join(each.cert_pem.bytes() for each in authorities))

    trust(old)
    for name in ("psservice", "a-worker"):
        put_certificate(tmp_path, old, name)
    server = {"tls_cert": tmp_path / "psservice.pem", "tls_key": tmp_path / "psservice.key"}
    mine = {"tls_ca": tmp_path / "ca.pem", "tls_cert": tmp_path / "a-worker.pem", "tls_key": tmp_path / "a-worker.key"}
    settings = ClientSettings(**LIMITS, **mine, tls_server_name="localhost")
    secured = server | {"tls_client_ca": tmp_path / "ca.pem", "certificate_roles": tmp_path / "roles"}
    with LocalServer(**secured, data_dir=tmp_path / "data", down_mode="exact") as running:
        model = make_model(batch_norm=False)
        options = {"lr": 0.05, "density": 0.05, "model": model, "server": running.server, "settings": settings}
        with psclient.GradientDropping(model.parameters(), **options) as optimizer:

            def reconnect_and_step():
                running.processes[0].kill()
                running.restart(0)
                train_step(model, optimizer, *make_data())

            reconnect_and_step()
            trust(old, new)
            reconnect_and_step()
            put_certificate(tmp_path, new, "a-worker")
            reconnect_and_step()
            put_certificate(tmp_path, new, "psservice")
            reconnect_and_step()
            trust(new)
            reconnect_and_step()
            assert optimizer.version == 5
        put_certificate(tmp_path, old, "a-worker")
        short = settings.model_copy(update={"connect_seconds": 3, "patience_seconds": 3})
        with pytest.raises(ServerUnreachableError):
            psclient.download(running.server, short, patience_seconds=3)

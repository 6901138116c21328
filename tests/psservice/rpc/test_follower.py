"""A shard reaches shard 0 over TLS, with the proof of an admin's token, and goes on without it."""

import threading

import pytest
import trustme

from psservice.process.server import Server, StartError
from psservice.settings import ServerSettings
from tests.system.tools import wait_until


@pytest.fixture
def files(tmp_path):
    """The authority, a certificate of it for this host, its key, and a file of tokens."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    (tmp_path / "tokens").write_text("admin admin-9f51a2c7e0\n")
    return tmp_path


def serve(files, index, **settings):
    secured = {"tls_cert": files / "cert.pem", "tls_key": files / "key.pem", "tokens": files / "tokens"}
    place = {"listen": "127.0.0.1:0", "shard_index": index, "num_shards": 2, "health_listen": "", "metrics_listen": ""}
    return Server(ServerSettings(**secured, **place, **settings))


def test_a_shard_that_cannot_check_shard_0_does_not_start(files):
    with pytest.raises(StartError, match="--coordinator-ca"):
        serve(files, 1, coordinator="127.0.0.1:1")


def test_a_socket_of_shards_that_others_may_enter_does_not_open(files):
    (files / "socket").mkdir()
    for mode, starts in ((0o750, False), (0o701, False), (0o700, True)):
        (files / "socket").chmod(mode)
        if starts:
            serve(files, 0, coordinator=f"unix:{files / 'socket' / 'shard-0'}").stop()
            continue
        with pytest.raises(StartError, match="chmod 700"):
            serve(files, 0, coordinator=f"unix:{files / 'socket' / 'shard-0'}")


def test_shard_0_follows_nobody_if_its_own_address_is_set_for_all_shards(files):
    first = serve(files, 0, coordinator="127.0.0.1:1")
    try:
        assert "follower" not in {thread.name for thread in threading.enumerate()}
    finally:
        first.stop()


@pytest.mark.parametrize("trusts", [True, False])
def test_a_shard_follows_over_tls_whom_it_trusts(files, trusts, tmp_path, caplog):
    trustme.CA().cert_pem.write_to_path(tmp_path / "another.pem")
    ca = files / ("ca.pem" if trusts else "another.pem")
    first = serve(files, 0, run_id="the-run")
    second = serve(files, 1, coordinator=first.address, coordinator_ca=ca)
    try:
        if trusts:
            wait_until(lambda: second.shard.run.run_id == "the-run")
        else:
            wait_until(lambda: "cannot be followed" in caplog.text)
            assert second.shard.run.run_id == ""
    finally:
        second.stop()
        first.stop()

"""Certificates that their authority should not have issued: none gets a role by a name that it does not have."""

import logging
import time
from types import SimpleNamespace

import grpc
import pytest
import trustme
from cryptography import x509

from psclient import LocalServer
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub
from psservice.rpc.certificate_names import LARGEST_PEM_BYTES, MOST_NAMES, NamesOfCertificates, read_names
from tests.certificates import dns, pem_of, uri, write

AUTHORITY = trustme.CA()
ADMIN = "sparseps-admin"
SUBJECT_ALTERNATIVE_NAME = x509.ObjectIdentifier("2.5.29.17")


def raw(value):
    """An extension of a subject alternative name with any bytes."""
    return x509.UnrecognizedExtension(SUBJECT_ALTERNATIVE_NAME, value)


LIES = {
    "a zero byte": ([dns(f"{ADMIN}\0.example.org")], ()),
    "a zero byte in a URI": ([uri("spiffe://example.org/admin\0/x")], ()),
    "a line end": ([dns(f"{ADMIN}\n")], ()),
    "a line end before": ([dns(f"x\n{ADMIN}")], ()),
    "a space": ([dns(f"{ADMIN} ")], ()),
    "a dot": ([dns(f"{ADMIN}.")], ()),
    "two names in one": ([dns(f"x,{ADMIN}")], ()),
    "a wildcard": ([dns("*"), dns("*.example.org"), dns("*.admins.example.org")], ()),
    "an empty name": ([dns("")], ()),
    "an email": ([x509.RFC822Name(ADMIN)], ()),
    "another kind": ([uri(ADMIN), dns("spiffe://example.org/admin")], ()),
    "a wildcard of a URI": ([uri("spiffe://example.org/admins/*")], ()),
    "a path of two segments": ([uri("spiffe://example.org/admins/a/b")], ()),
    "a path upwards": ([uri("spiffe://example.org/admins/../x")], ()),
    "no name": ([], ()),
    "the common name only": ([], ()),
    "bytes that are no ASCII": ([], (raw(b"\x30\x04\x82\x02\xc3\xa9"),)),
    "nonsense": ([], (raw(b"\xff\xff\xff\xff"),)),
    "a length beyond the end": ([], (raw(b"\x30\x7f\x82\x7e" + ADMIN.encode()),)),
    "far names": ([dns(f"n{number}.example.org") for number in range(MOST_NAMES)] + [dns(ADMIN)], ()),
    "thousands of names": ([dns(ADMIN)] + [dns(f"n{number}.example.org") for number in range(3000)], ()),
}
REFUSED_BY_TLS = ("nonsense", "a length beyond the end", "thousands of names")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("server")
    roles = f"admin {ADMIN}\nadmin *.admins.example.org\nadmin spiffe://example.org/admin\n"
    (directory / "roles").write_text(roles + "admin spiffe://example.org/admins/*\n")
    files = write(AUTHORITY, directory, "server", dns("localhost"))
    secured = {"tls_cert": files["tls_cert"], "tls_key": files["tls_key"], "tls_client_ca": files["tls_ca"]}
    with LocalServer(**secured, certificate_roles=directory / "roles") as running:
        yield running


def ask(server, mine):
    files = (mine[name].read_bytes() for name in ("tls_ca", "tls_key", "tls_cert"))
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", "localhost"))
    with grpc.secure_channel(server.addresses[0], grpc.ssl_channel_credentials(*files), options) as channel:
        return ParameterServerServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=20)


@pytest.mark.parametrize("lie", LIES)
def test_no_certificate_gets_a_role_by_a_name_that_it_does_not_have(lie, server, tmp_path):
    names, extensions = LIES[lie]
    common_name = ADMIN if lie == "the common name only" else "anybody"
    mine = write(AUTHORITY, tmp_path, "caller", *names, common_name=common_name, extensions=extensions)
    with pytest.raises(grpc.RpcError) as refused:
        ask(server, mine)
    if lie in REFUSED_BY_TLS:
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    else:
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "--certificate-roles" in refused.value.details()
        assert len(refused.value.details()) < 1000
    assert ask(server, write(AUTHORITY, tmp_path, "admin", dns(ADMIN)))


def test_a_certificate_is_read_once_and_a_bounded_number_is_remembered(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    known = NamesOfCertificates()
    monkeypatch.setattr("psservice.rpc.certificate_names._MOST_KNOWN", 3)
    certificates = [pem_of(AUTHORITY, dns(f"n{number}"))[0] for number in range(5)]
    for pem in certificates:
        context = SimpleNamespace(auth_context=lambda pem=pem: {"x509_pem_cert": [pem]})
        assert known.of(context) is known.of(context)
    assert len(known._known) == 3
    large, _ = pem_of(AUTHORITY, dns(ADMIN), *(dns(f"n{number}.example.org") for number in range(900)))
    assert len(large) > LARGEST_PEM_BYTES
    for found in ({"x509_pem_cert": [large]}, {}):
        names = known.of(SimpleNamespace(auth_context=found.copy))
        assert names.fault
        assert not names


def test_the_largest_certificate_that_is_read_takes_milliseconds():
    names = [dns(f"n{number}.example.org") for number in range(600)]
    pem, _ = pem_of(AUTHORITY, *names)
    assert LARGEST_PEM_BYTES * 3 // 4 < len(pem) <= LARGEST_PEM_BYTES
    began = time.perf_counter()
    assert len(read_names(pem).dns) == MOST_NAMES
    assert time.perf_counter() - began < 1.0

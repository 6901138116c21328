"""All shards behind one name: found, waited for, and looked for again when one is lost."""

import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from psclient.errors import AccessError, ConfigurationError, ServerUnreachableError
from psclient.rpc.lease_thread import LeaseThread
from psclient.rpc.resolver import ShardResolver, connect
from psclient.rpc.shard_stream import ShardStream
from psclient.settings import ClientSettings
from pscore.model.layout import Span
from pscore.net import discovery
from pscore.net.addresses import expand
from pscore.net.channels import Security
from pscore.wire.errors import ErrorCode, Rejected, to_status
from pscore.wire.messages import SHARD_HEADER
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import (
    ParameterServerServiceServicer,
    add_ParameterServerServiceServicer_to_server,
)
from verify.cluster.servers import free_ports

NAME = "psservice.test"


class Shard(ParameterServerServiceServicer):
    """Answers who it is, at an address of its own."""

    def __init__(self, index, num_shards, run_id="run"):
        self.answer = pb.GetStatusResponse(shard_index=index, num_shards=num_shards, run_id=run_id, generation=7)
        self.refusal = None
        self.heard, self.renewed = [], 0

    def RenewLease(self, request, context):  # noqa: N802
        self.meet.wait()  # until the others are asked too
        self.renewed += 1
        return pb.RenewLeaseResponse()

    def GetStatus(self, request, context):  # noqa: N802
        self.heard.append((request.brief, dict(context.invocation_metadata())))
        if self.refusal:
            context.abort_with_status(to_status(self.refusal))
        return self.answer


class Net:
    """Hosts of the loopback network, all on one port, and one name."""

    def __init__(self, credentials=None):
        [self.port] = free_ports(1)
        self.credentials = credentials
        self.servers, self.name, self.asked = {}, [], 0

    @property
    def address(self):
        return f"dns:///{NAME}:{self.port}"

    def host(self, ip, shard):
        """Let a shard listen; in the place of who was there."""
        self.silence(ip)
        server = grpc.server(ThreadPoolExecutor(2))
        add_ParameterServerServiceServicer_to_server(shard, server)
        target = f"[{ip}]:{self.port}" if ":" in ip else f"{ip}:{self.port}"
        if self.credentials:
            server.add_secure_port(target, self.credentials)
        else:
            server.add_insecure_port(target)
        server.start()
        self.servers[ip] = server
        return target

    def silence(self, ip):
        if ip in self.servers:
            self.servers.pop(ip).stop(None).wait()

    def resolve(self, host, port, **_):
        assert (host, port) == (NAME, self.port)
        self.asked += 1
        if not self.name:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(None, None, None, "", (ip, port)) for ip in self.name]

    def close(self):
        for ip in list(self.servers):
            self.silence(ip)


@pytest.fixture
def net(monkeypatch):
    net = Net()
    monkeypatch.setattr(discovery.socket, "getaddrinfo", net.resolve)
    yield net
    net.close()


def found(net, seconds=30.0, **security):
    resolver = ShardResolver(net.address, Security(**security), seconds)
    return [resolver.locate(index) for index in range(resolver.total)]


def test_shards_are_put_in_order(net):
    at = {index: net.host(f"127.0.0.{9 - index}", Shard(index, 3)) for index in range(3)}
    net.name = ["127.0.0.8", "127.0.0.7", "127.0.0.9"]
    assert found(net) == [at[0], at[1], at[2]]


def test_one_server_may_have_a_name_and_an_address_that_nobody_answers(net):
    at = net.host("127.0.0.2", Shard(0, 1))
    net.name = ["127.0.0.3", "127.0.0.2"]
    assert found(net) == [at]


def test_a_call_over_a_connection_says_which_shard_it_is_for(net):
    shards = [Shard(index, 2) for index in range(2)]
    net.name = ["127.0.0.2", "127.0.0.3"]
    for ip, shard in zip(net.name, shards, strict=True):
        net.host(ip, shard)
    for connection in connect(net.address, Security(), 30.0):
        connection.stub.GetStatus(pb.GetStatusRequest(), timeout=30)
        connection.close()
    assert [shard.heard[-1][1][SHARD_HEADER] for shard in shards] == ["0 of 2", "1 of 2"]
    assert all(shard.heard[0][0] and SHARD_HEADER not in shard.heard[0][1] for shard in shards)


def test_shards_that_start_later_are_waited_for(net, monkeypatch, caplog):
    net.host("127.0.0.2", Shard(1, 2))

    def resolve(*arguments, **options):
        if net.asked == 1:
            net.name = ["127.0.0.2"]
        elif net.asked == 2:
            net.host("127.0.0.3", Shard(0, 2))
            net.name = ["127.0.0.2", "127.0.0.3"]
        return net.resolve(*arguments, **options)

    monkeypatch.setattr(discovery.socket, "getaddrinfo", resolve)
    assert len(found(net)) == 2
    assert "psservice.test does not resolve" in caplog.text


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ([(0, 3), (2, 3)], "shard 1 of 3 is missing"),
        ([(2, 3)], "shards 0, 1 of 3 are missing"),
        ([(0, 1), (0, 1)], r"shard 0 of 1 is missing; .* are both shard 0; stop one of them"),
        ([(0, 2), (1, 3)], r"no shard is found; the servers belong to different runs: .* is shard 0 of 2"),
        ([(0, 1 << 31)], "they are 2147483648; at most 1024 are possible"),
        ([(7, 3)], "no shard is found"),
        ([(0, 0)], "no shard is found"),
        ([], r"psservice\.test does not resolve \(Name or service not known\)"),
    ],
)
def test_what_is_missing_is_said_at_the_end(net, shards, words):
    net.name = [f"127.0.0.{ip}" for ip, _ in enumerate(shards, start=2)]
    for ip, place in zip(net.name, shards, strict=True):
        net.host(ip, Shard(*place))
    with pytest.raises(ServerUnreachableError, match=words) as caught:
        found(net, 0.5)
    assert caught.value.address == net.address


def test_an_operator_finds_them_too(net):
    at = net.host("127.0.0.2", Shard(0, 2))
    net.name = ["127.0.0.2"]
    assert discovery.find("a-{0..1}:1", Security(), 30.0) == (("a-0:1", "a-1:1"), Security())
    with pytest.raises(discovery.DiscoveryError, match=r"dns:///psservice\.test.*: shard 1 of 2 is missing"):
        discovery.find(net.address, Security(), 30.0)
    net.name.append("127.0.0.3")
    other = net.host("127.0.0.3", Shard(1, 2))
    assert discovery.find(net.address, Security(), 30.0) == ((at, other), Security(server_name=NAME))


def test_an_address_of_each_family_may_be_the_same_server(net):
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    shard = Shard(0, 1)
    at = net.host("::1", shard)
    net.host("127.0.0.2", shard)
    net.name = ["::1", "127.0.0.2"]
    assert found(net) == [at]
    net.host("127.0.0.2", Shard(0, 1, run_id="another"))
    with pytest.raises(ServerUnreachableError, match="are both shard 0"):
        found(net, 0.5)


def test_a_server_that_asks_for_a_token_is_told_at_once(net):
    shard = Shard(0, 1)
    shard.refusal = Rejected(ErrorCode.UNAUTHENTICATED, "no token came with it")
    net.host("127.0.0.2", shard)
    net.name = ["127.0.0.2"]
    with pytest.raises(AccessError, match="no token"):
        found(net)


def test_a_token_does_not_travel_in_plaintext(net):
    net.name = ["10.0.0.1"]
    with pytest.raises(ConfigurationError, match="in plaintext"):
        found(net, token="secret")


@pytest.mark.parametrize(
    ("names", "server_name", "fits"),
    [([NAME], "", True), (["elsewhere.test"], "", False), (["elsewhere.test"], "elsewhere.test", True)],
)
def test_certificates_have_the_name_of_the_service(monkeypatch, tmp_path, names, server_name, fits):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = authority.issue_cert(*names)
    chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    net = Net(grpc.ssl_server_credentials([(issued.private_key_pem.bytes(), chain)]))
    monkeypatch.setattr(discovery.socket, "getaddrinfo", net.resolve)
    at = net.host("127.0.0.2", Shard(0, 1))
    net.name = ["127.0.0.2"]
    try:
        security = {"ca": tmp_path / "ca.pem", "server_name": server_name}
        if fits:
            assert found(net, **security) == [at]
        else:
            with pytest.raises(ServerUnreachableError, match=r"127\.0\.0\.2:.* does not answer"):
                found(net, 0.5, **security)
    finally:
        net.close()


@pytest.fixture
def resolver(net, monkeypatch):
    """One of two shards, whose addresses are looked for with every call."""
    net.name = ["127.0.0.2", "127.0.0.3"]
    for index, ip in enumerate(net.name):
        net.host(ip, Shard(index, 2))
    resolver = ShardResolver(net.address, Security(), 30.0)
    monkeypatch.setattr("psclient.rpc.resolver._FRESH_SECONDS", 0.0)
    return resolver


def test_a_lost_shard_is_found_at_its_new_address(net, resolver):
    net.silence("127.0.0.3")
    at = net.host("127.0.0.4", Shard(1, 2))
    net.name = ["127.0.0.4", "127.0.0.2"]
    assert resolver.locate(1) == at


def test_shards_that_have_changed_places_are_found(net, resolver):
    first, second = resolver.locate(0), resolver.locate(1)
    net.host("127.0.0.2", Shard(1, 2))
    net.host("127.0.0.3", Shard(0, 2))
    assert (resolver.locate(1), resolver.locate(0)) == (first, second)


def test_a_shard_of_another_run_is_not_taken_for_a_lost_one(net, resolver, caplog):
    before = resolver.locate(1)
    net.silence("127.0.0.3")
    net.host("127.0.0.4", Shard(1, 3))
    net.name = ["127.0.0.4", "127.0.0.2"]
    for _ in range(3):
        assert resolver.locate(1) == before
    assert [record.levelno for record in caplog.records] == [logging.WARNING]  # once
    assert "looking for shard 1 (127.0.0.4" in caplog.text


def test_a_name_that_takes_long_to_resolve_is_asked_for_once(net, monkeypatch):
    asked, answered = [], threading.Event()

    def resolve(*_, **__):
        asked.append(True)
        answered.wait(60)
        return [(None, None, None, "", ("127.0.0.2", net.port))]

    monkeypatch.setattr(discovery.socket, "getaddrinfo", resolve)
    service = discovery.Service(net.address, Security())
    for _ in range(3):
        with pytest.raises(TimeoutError, match="not resolved after"):
            service.resolve(0.05)
    answered.set()
    assert service.resolve(30.0) == [f"127.0.0.2:{net.port}"]
    assert len(asked) == 1


def test_leases_are_renewed_at_all_shards_at_once(net):
    shards = [Shard(index, 3) for index in range(3)]
    net.name = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    meet = threading.Barrier(3, timeout=30)
    for ip, shard in zip(net.name, shards, strict=True):
        net.host(ip, shard)
        shard.meet = meet
    connections = connect(net.address, Security(), 30.0)
    clients = [ShardStream(connection, i, Span(i, i + 1), ClientSettings()) for i, connection in enumerate(connections)]
    leases = LeaseThread(clients, pb.WorkerIdentity())
    leases.renewal_seconds = 30.0
    leases._renew()
    assert [shard.renewed for shard in shards] == [1, 1, 1]
    for connection in connections:
        connection.close()


# Ports in a row on one host


@given(
    st.builds(
        pb.GetStatusResponse,
        shard_index=st.integers(0, 2**32 - 1) | st.integers(0, 5),
        num_shards=st.integers(0, 2**32 - 1) | st.integers(0, 5),
        ports_in_a_row=st.booleans(),
    ),
    st.integers(1, 65535),
)
def test_whatever_a_server_says_of_its_row_only_ports_that_can_be_are_asked(status, port):
    found = discovery.in_a_row(f"[::1]:{port}", status)
    assert expand(",".join(found)) == found
    if found != (f"[::1]:{port}",):
        assert status.ports_in_a_row
        assert len(found) == status.num_shards
        assert found[status.shard_index] == f"[::1]:{port}"


def test_one_address_of_a_row_names_all_shards_to_workers_and_operators(net):
    shard = Shard(1, 3)
    shard.answer.ports_in_a_row = True
    address, port = net.host("127.0.0.2", shard), net.port
    row = tuple(f"127.0.0.2:{port + step}" for step in (-1, 0, 1))
    connections = connect(address, Security(), 30.0)
    assert tuple(each.address for each in connections) == row
    assert discovery.find(address, Security(), 30.0) == (row, Security())
    for connection in connections:
        connection.close()


def test_a_name_of_one_host_names_its_row(net):
    shard = Shard(0, 3)
    shard.answer.ports_in_a_row = True
    net.host("127.0.0.2", shard)
    net.name = ["127.0.0.2"]
    assert found(net) == [f"127.0.0.2:{net.port + index}" for index in range(3)]


@pytest.mark.parametrize("place", [(0, 1), (1, 3)])
def test_one_address_without_a_row_is_one_shard(net, place):
    address = net.host("127.0.0.2", Shard(*place))
    assert discovery.find(address, Security(), 30.0) == ((address,), Security())
    (connection,) = connect(address, Security(), 30.0)
    connection.close()


def test_one_address_that_nobody_answers_is_tried_as_long_as_the_first_contact(net):
    with pytest.raises(ServerUnreachableError):
        connect(f"127.0.0.2:{net.port}", Security(), 0.5)
    assert discovery.find(f"127.0.0.2:{net.port}", Security(), 30.0)[0] == (f"127.0.0.2:{net.port}",)

"""Finding all shards from one address or one DNS name.

Shards of one host have ports in a row: any of them tells which one it is. A headless Service of Kubernetes has a record
for each shard that is ready, in no order: each address is asked which shard it is.
"""

import queue
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import grpc

from pscore.net.addresses import MOST_SHARDS, SEPARATOR, expand, is_service, split
from pscore.net.alternatives import alternatives, serves, serving
from pscore.net.channels import ChannelError, Security, explain, open_channel
from pscore.wire.v1 import parameter_server_pb2 as pb
from pscore.wire.v1.parameter_server_pb2_grpc import ParameterServerServiceStub

_QUERY_SECONDS = 5.0


class DiscoveryError(Exception):
    """Shards behind a name are missing; the message names the shards and the reasons."""


def find(server: str, security: Security, seconds: float) -> tuple[tuple[str, ...], Security]:
    """Return every shard's address and the security of its channel; one address or name for all is asked once.

    Of servers that stand for one another it is the address of the one that serves now.

    ``server`` has any form of :func:`pscore.net.addresses.expand`. The name has so many ``seconds`` to answer, and the
    servers as many again.

    Raises:
        AddressError, ChannelError: see :mod:`pscore.net.addresses` and :mod:`pscore.net.channels`.
        DiscoveryError: shards behind the name are missing.
    """
    addresses = expand(server)
    if not is_service(addresses[0]):
        addresses = tuple(serving(address, security, min(seconds, _QUERY_SECONDS)) for address in addresses)
        if len(addresses) > 1:
            return addresses, security
        return _ask_for_others(addresses[0], security, min(seconds, _QUERY_SECONDS)), security
    service = Service(addresses[0], security)
    result = service.discover(seconds)
    if result.addresses is None:
        raise DiscoveryError(f"{service.address}: {result.describe()}")
    return result.addresses, service.security


def in_order(addresses: Sequence[str], security: Security, seconds: float) -> Sequence[str]:
    """Return the addresses of all shards, each named by itself, in the order of their shards, by asking each.

    They stay as they are if one does not answer, or they are not all shards of one run: the caller meets that error.
    """
    found = {}
    for address in addresses:
        try:
            with open_channel(address, security) as channel:
                stub = ParameterServerServiceStub(channel)
                found[stub.GetStatus(pb.GetStatusRequest(brief=True), timeout=seconds).shard_index] = address
        except (ChannelError, grpc.RpcError):
            return addresses
    return [found[index] for index in sorted(found)] if len(found) == len(addresses) else addresses


def in_a_row(address: str, status: pb.GetStatusResponse) -> tuple[str, ...]:
    """Return the address of each shard that has its port in a row with this one, of this status; or this one alone.

    Servers that stand for one another have their ports in rows alike.
    """
    servers = alternatives(address)
    if len(servers) > 1:
        rows = [in_a_row(each, status) for each in servers]
        return tuple(SEPARATOR.join(each) for each in zip(*rows, strict=True))
    first, total = split(address)[1] - status.shard_index, status.num_shards
    is_possible = status.shard_index < total <= MOST_SHARDS and 0 < first <= 65536 - total
    if not (status.ports_in_a_row and is_possible):
        return (address,)
    host = address.rpartition(":")[0]
    return tuple(f"{host}:{first + index}" for index in range(total))


def _ask_for_others(address: str, security: Security, seconds: float) -> tuple[str, ...]:
    try:
        with open_channel(address, security) as channel:
            stub = ParameterServerServiceStub(channel)
            return in_a_row(address, stub.GetStatus(pb.GetStatusRequest(brief=True), timeout=seconds))
    except (ChannelError, grpc.RpcError):  # the caller meets the same error, and tells it
        return (address,)


@dataclass(frozen=True)
class DiscoveryResult:
    """The address of each shard that has answered and is in no doubt, obstacles in words, and failed calls by address.

    ``num_shards`` is the number expected; 0 if no server has answered.
    """

    shards: Mapping[int, str]
    num_shards: int
    troubles: Sequence[str] = ()
    errors: Mapping[str, grpc.RpcError] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        """Shards without an address."""
        return [index for index in range(self.num_shards) if index not in self.shards]

    @property
    def addresses(self) -> tuple[str, ...] | None:
        """The address of each shard, in order; ``None`` if some are missing or the servers disagree."""
        if not self.num_shards or self.missing:
            return None
        return tuple(self.shards[index] for index in range(self.num_shards))

    def describe(self) -> str:
        """Return which shards are missing, and why."""
        if self.num_shards:
            several = len(self.missing) > 1
            numbers = ", ".join(map(str, self.missing))
            missing = f"shard{'s' * several} {numbers} of {self.num_shards} {'are' if several else 'is'} missing"
        else:
            missing = "no shard is found"
        return "; ".join([missing, *self.troubles])


class Service:
    """All shards of a run, behind one name ``dns:///HOST:PORT``.

    With TLS, each certificate must have the service's name, or ``security.server_name``.
    """

    def __init__(self, address: str, security: Security) -> None:
        self.address = address
        self.host, self.port = split(address)
        self.security = replace(security, server_name=security.server_name or self.host)
        self._lookup: queue.SimpleQueue[list[str] | OSError] | None = None

    def discover(self, seconds: float) -> DiscoveryResult:
        """Resolve the name and ask every address; at most ``seconds`` for each of the two."""
        try:
            found = self.resolve(seconds)
        except OSError as error:
            return DiscoveryResult({}, 0, [str(error)])
        return self.ask(found, seconds)

    def resolve(self, seconds: float) -> list[str]:
        """Return every address of the name, as ``IP:PORT``; raises ``OSError`` if there is none in time."""
        if self._lookup is None:  # else the lookup before has not returned yet
            self._lookup = queue.SimpleQueue()
            arguments = (self.host, self.port, self._lookup)
            threading.Thread(target=_resolve, args=arguments, name="resolve", daemon=True).start()
        try:
            found = self._lookup.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"the name {self.host} is not resolved after {seconds:g} s") from None
        self._lookup = None
        if isinstance(found, OSError):
            raise OSError(f"the name {self.host} does not resolve ({found.strerror or found})") from found
        return found

    def ask(self, addresses: Sequence[str], seconds: float, num_shards: int = 0) -> DiscoveryResult:
        """Ask addresses, all at once, which shard they are; raises :class:`ChannelError` as :func:`open_channel` does.

        If ``num_shards`` of the run is known, a server with another number belongs to another run.
        """
        channels: list[grpc.Channel] = []
        calls: list[grpc._CallFuture[pb.GetStatusResponse]] = []
        try:
            for address in addresses:
                channels.append(open_channel(address, self.security, (("grpc.use_local_subchannel_pool", 1),)))
                stub = ParameterServerServiceStub(channels[-1])
                calls.append(stub.GetStatus.future(pb.GetStatusRequest(brief=True), timeout=seconds))
            answers: dict[str, pb.GetStatusResponse] = {}
            errors: dict[str, grpc.RpcError] = {}
            for address, call in zip(addresses, calls, strict=True):
                try:
                    answers[address] = call.result()
                except grpc.RpcError as error:
                    errors[address] = error
        finally:
            for channel in channels:
                channel.close()
        return _sort(answers, errors, num_shards)


def _sort(
    answers: Mapping[str, pb.GetStatusResponse], errors: Mapping[str, grpc.RpcError], num_shards: int
) -> DiscoveryResult:
    """Assign an address to each shard; a shard that two servers claim has none."""
    troubles = [f"{address} does not answer ({e.code().name}: {explain(e, address)})" for address, e in errors.items()]
    answers = {
        address: answer
        for address, answer in answers.items()
        if answer.shard_index < answer.num_shards and serves(answer)
    }
    totals = {num_shards} if num_shards else {answer.num_shards for answer in answers.values()}
    if len(totals) > 1:
        claims = ", ".join(f"{a} is shard {s.shard_index} of {s.num_shards}" for a, s in answers.items())
        return DiscoveryResult({}, 0, [*troubles, f"the servers belong to different runs: {claims}"], errors)
    total = totals.pop() if totals else 0
    if total > MOST_SHARDS:
        troubles.append(f"the servers say that they are {total}; at most {MOST_SHARDS} are possible")
        return DiscoveryResult({}, 0, troubles, errors)
    shards: dict[int, str] = {}
    doubtful: set[int] = set()
    for address, answer in answers.items():
        index = answer.shard_index
        if answer.num_shards != total:
            troubles.append(f"{address} is shard {index} of {answer.num_shards}, of another run")
        elif index not in shards:
            shards[index] = address
        elif not _is_one_server(shards[index], answers[shards[index]], address, answer):
            doubtful.add(index)
            troubles.append(f"{shards[index]} and {address} are both shard {index}; stop one of them")
    for address, answer in answers.items():
        row = in_a_row(address, answer)
        if answer.num_shards == total == len(row):
            shards = dict(enumerate(row)) | shards
    return DiscoveryResult({i: a for i, a in shards.items() if i not in doubtful}, total, troubles, errors)


def _is_one_server(one: str, of_one: pb.GetStatusResponse, other: str, of_other: pb.GetStatusResponse) -> bool:
    """Tell whether two addresses are the IPv4 and the IPv6 address of one server."""
    families_differ = one.startswith("[") != other.startswith("[")
    return families_differ and (of_one.run_id, of_one.generation) == (of_other.run_id, of_other.generation)


def _resolve(host: str, port: int, answer: "queue.SimpleQueue[list[str] | OSError]") -> None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        answer.put(error)
        return
    ips = [str(entry[4][0]) for entry in found]
    answer.put(list(dict.fromkeys(f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip in ips)))

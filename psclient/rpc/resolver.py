"""Where all shards are, from one address or one DNS name, behind which an address may become another shard's."""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from psclient import settings as client_settings
from psclient.errors import START_FIRST, AccessError, ConfigurationError, Transient, from_rpc_error
from psclient.rpc.channel import Connection, RetryPolicy
from pscore.net.addresses import is_service
from pscore.net.alternatives import alternatives, serving
from pscore.net.channels import ChannelError, Security
from pscore.net.discovery import DiscoveryResult, Service, in_a_row
from pscore.wire.errors import Rejected
from pscore.wire.messages import SHARD_HEADER, place_of
from pscore.wire.v1 import parameter_server_pb2 as pb

log = logging.getLogger("psclient")

_QUERY_SECONDS = 3.0  # for the name's resolution, and then for the servers
_FRESH_SECONDS = 1.0  # how old the knowledge of a lost shard's address may be


class ShardResolver:
    """The addresses of all shards of one run, behind ``dns:///HOST:PORT``, which are found when this is made.

    ``security`` is that of a call to a shard: its certificate has the name of the service.

    Raises:
        ServerUnreachableError: a shard is still missing after ``seconds``, or two servers claim to be the same one.
        AccessError: a server asks for another token.
        ConfigurationError: no channel can be secured as asked.
    """

    def __init__(self, address: str, security: Security, seconds: float, hint: str = START_FIRST) -> None:
        self.address = address
        self._service = Service(address, security)
        self.security = self._service.security
        self._lock = threading.Lock()
        self._has_warned = False
        self._known = RetryPolicy(seconds, _QUERY_SECONDS, hint).run(address, self._find)
        self._updated, self.total = time.monotonic(), len(self._known)

    def _find(self, seconds: float) -> list[str]:
        try:
            found = self._service.discover(seconds)
        except ChannelError as error:
            raise ConfigurationError(str(error)) from error
        for failed in found.errors.values():
            if isinstance(failure := from_rpc_error(failed), AccessError):
                raise failure
        if found.addresses is None:
            raise Transient(found.describe())
        return list(found.addresses)

    def locate(self, index: int) -> str:
        """Return a shard's address: resolved now, or the last one that was known."""
        with self._lock:
            if time.monotonic() - self._updated >= _FRESH_SECONDS:
                self._update(index)
                self._updated = time.monotonic()
            return self._known[index]

    def _update(self, index: int) -> None:
        try:
            addresses = self._service.resolve(_QUERY_SECONDS)
            others = {address for i, address in enumerate(self._known) if i != index}
            candidates = [address for address in addresses if address not in others]
            found = self._service.ask(candidates, _QUERY_SECONDS, self.total)
            if index not in found.shards:  # shards may have changed places
                found = self._service.ask(addresses, _QUERY_SECONDS, self.total)
        except (OSError, ChannelError) as error:
            found = DiscoveryResult({}, self.total, [str(error)])
        for shard, address in found.shards.items():
            self._known[shard] = address
        if index not in found.shards and not self._has_warned:
            why = "; ".join(found.troubles) or "no address of the name is its"
            log.warning("%s: looking for shard %d (%s)", self.address, index, why)
        self._has_warned = index not in found.shards


def connect(
    server: str, security: Security, seconds: float, hint: str = START_FIRST, *, announce: bool = True
) -> list[Connection]:
    """Return a connection to each shard, in order; ``server`` is as in docs/operate/addresses.md.

    ``seconds`` and ``hint`` are for finding the shards from one address or name. ``announce`` tells each server for
    which shard a call is meant, so that another shard refuses the call.
    """
    addresses = client_settings.addresses(server)
    if len(addresses) == 1 and not is_service(addresses[0]):
        addresses = _ask_for_others(addresses[0], security, RetryPolicy(seconds, _QUERY_SECONDS, hint))
    shards = [(address, _locator(address, security)) for address in addresses]
    if is_service(addresses[0]):
        resolver = ShardResolver(addresses[0], security, seconds, hint)
        security = resolver.security
        shards = [(f"shard {i} of {addresses[0]}", partial(resolver.locate, i)) for i in range(resolver.total)]
    return [
        Connection(name, security, ((SHARD_HEADER, place_of(index, len(shards))),) if announce else (), locate)
        for index, (name, locate) in enumerate(shards)
    ]


def _locator(address: str, security: Security) -> Callable[[], str] | None:
    """Return a function that finds the server of one shard that serves; ``None`` if the shard has one server."""
    if len(alternatives(address)) == 1:
        return None

    def locate() -> str:
        try:
            return serving(address, security, _QUERY_SECONDS)
        except ChannelError as error:
            raise ConfigurationError(str(error)) from error

    return locate


def _ask_for_others(address: str, security: Security, policy: RetryPolicy) -> tuple[str, ...]:
    """Return the address of each shard that has its port in a row with this one, or this one alone."""
    connection = Connection(address, security, locate=_locator(address, security))
    try:
        status = connection.call(
            policy,
            lambda seconds: connection.result(
                connection.stub.GetStatus.future(pb.GetStatusRequest(brief=True), timeout=seconds)
            ),
        )
    finally:
        connection.close()
    return (address,) if isinstance(status, Rejected) else in_a_row(address, status)  # a refusal is met again

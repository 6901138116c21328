"""Where the shards behind one DNS name are now: found before the first contact, and looked for again when one is lost.

An address belongs to a shard only as long as its pod: after restarts it may be nobody's, or another shard's.
"""

import logging
import threading
import time
from functools import partial

from psclient import settings as client_settings
from psclient.errors import START_FIRST, AccessError, ConfigurationError, Transient, from_rpc_error
from psclient.rpc.channel import Connection, RetryPolicy
from pscore.net.addresses import is_service
from pscore.net.channels import ChannelError, Headers, Security
from pscore.net.discovery import DiscoveryResult, Service
from pscore.wire.messages import SHARD_HEADER, place_of

log = logging.getLogger("psclient")

_LOOK_SECONDS = 3.0
"""How long the name's resolution, and then the servers, may take to answer one look."""
_FRESH_SECONDS = 1.0
"""How old the knowledge of a lost shard's address may be."""


class Directory:
    """The addresses of all shards of one run.

    Args:
        address: ``dns:///HOST:PORT``.
        security: how the servers are called.
    """

    def __init__(self, address: str, security: Security) -> None:
        """Prepare; :meth:`find` is the first look."""
        self.address = address
        self._service = Service(address, security)
        self._lock = threading.Lock()
        self._known: list[str] = []
        self._looked = -_FRESH_SECONDS
        self._troubled = False

    @property
    def security(self) -> Security:
        """How each of them is called: their certificates have the name of the service."""
        return self._service.security

    def find(self, seconds: float, hint: str = START_FIRST) -> int:
        """Find all shards, and return how many there are.

        Raises:
            ServerUnreachableError: one is still missing after ``seconds``, or two servers say that they are the same.
            AccessError: a server asks for another token.
            ConfigurationError: no channel can be secured as asked.
        """
        for attempt in RetryPolicy(self.address, seconds, _LOOK_SECONDS, hint):
            with attempt:
                try:
                    sighting = self._service.discover(attempt.timeout)
                except ChannelError as error:
                    raise ConfigurationError(str(error)) from error
                for failed in sighting.errors.values():
                    if isinstance(failure := from_rpc_error(failed), AccessError):
                        raise failure
                if sighting.addresses is None:
                    raise Transient(sighting.describe())
                self._known, self._looked = list(sighting.addresses), time.monotonic()
                return len(self._known)
        raise AssertionError("patience does not end by itself")

    def locate(self, index: int) -> str:
        """Return a shard's address: looked for now, or the last one that was known."""
        with self._lock:
            if time.monotonic() - self._looked >= _FRESH_SECONDS:
                self._look(index)
                self._looked = time.monotonic()
            return self._known[index]

    def _look(self, index: int) -> None:
        try:
            found = self._service.resolve(_LOOK_SECONDS)
            others = {address for i, address in enumerate(self._known) if i != index}
            sighting = self._ask([address for address in found if address not in others])
            if index not in sighting.shards:  # shards may have changed places
                sighting = self._ask(found)
        except (OSError, ChannelError) as error:
            sighting = DiscoveryResult({}, len(self._known), [str(error)])
        for shard, address in sighting.shards.items():
            self._known[shard] = address
        if index in sighting.shards:
            self._troubled = False
        elif not self._troubled:
            self._troubled = True
            why = "; ".join(sighting.troubles) or "no address of the name is its"
            log.warning("%s: looking for shard %d (%s)", self.address, index, why)

    def _ask(self, addresses: list[str]) -> DiscoveryResult:
        return self._service.ask(addresses, _LOOK_SECONDS, len(self._known))


def connect(
    server: str, security: Security, seconds: float, hint: str = START_FIRST, *, announce: bool = True
) -> list[Connection]:
    """Return a connection to each shard, in order.

    Args:
        server: how the servers are named (docs/addresses.md).
        security: how they are called.
        seconds: how long to look for them, where one name stands for all.
        hint: what to do when they are not found.
        announce: whether each call says which shard it is meant for, so that another one refuses it.

    Raises:
        ConfigurationError: they are named in no way that is known, or no channel can be secured as asked.
        ServerUnreachableError, AccessError: see :meth:`Directory.find`.
    """
    addresses = client_settings.addresses(server)
    if not is_service(addresses[0]):
        places = _headers(len(addresses)) if announce else [()] * len(addresses)
        return [Connection(address, security, place) for address, place in zip(addresses, places, strict=True)]
    directory = Directory(addresses[0], security)
    total = directory.find(seconds, hint)
    return [
        Connection(
            f"shard {index} of {directory.address}",
            directory.security,
            place if announce else (),
            partial(directory.locate, index),
        )
        for index, place in enumerate(_headers(total))
    ]


def _headers(num_shards: int) -> list[Headers]:
    return [((SHARD_HEADER, place_of(index, num_shards)),) for index in range(num_shards)]

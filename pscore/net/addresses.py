"""How servers are named: a list of addresses, a range of them, or one name behind which all of them are found.

The forms are those of docs/operate/addresses.md; workers and operators read them alike.
"""

import ipaddress
import re

MOST_SHARDS = 1024
"""A longer list is a slip, as ``{0..99999}``."""

SERVICE_PREFIX = "dns:///"

SEPARATOR = "/"
"""Between the servers of one shard, of which one serves."""

_RANGE = re.compile(r"\{([^{}]*)\}")
_ENDS = re.compile(r"(0|[1-9][0-9]{0,8})\.\.(0|[1-9][0-9]{0,8})")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*\.?")
_LONGEST_NAME = 253
_SHOWN = 100  # characters of a wrong address in a message


class AddressError(ValueError):
    """An address has none of the forms; the message names the right form."""


def expand(server: str) -> tuple[str, ...]:
    """Return the address of each shard, in order.

    Args:
        server: ``HOST:PORT``, several with commas between them, a range in braces (``ps-{0..3}.ps:50051`` are four), or
            one ``dns:///HOST:PORT``, behind which :mod:`pscore.net.discovery` finds all shards. In a list,
            ``dns:///`` means nothing and is left out. An IPv6 address stands in brackets. In place of a ``HOST:PORT``,
            ``HOST:PORT/HOST:PORT`` are a server and its standby, in any order, of which one serves
            (:mod:`pscore.net.alternatives`).

    Raises:
        AddressError: it is none of these, or names an address twice.
    """
    written = [part.strip() for part in server.split(",") if part.strip()]
    found = [address for part in written for address in _expand(part)]
    if not found:
        raise AddressError(f"server {_short(server)}: give each shard's HOST:PORT, in order, or dns:///HOST:PORT")
    if len(found) > MOST_SHARDS:
        raise AddressError(f"server {_short(server)} names {len(found)} shards; at most {MOST_SHARDS} are possible")
    if len(found) > 1 or not _names_a_service(found[0]):
        found = [address.removeprefix(SERVICE_PREFIX) for address in found]
    servers = [server for address in found for server in _servers(address)]
    for each in servers:
        split(each)
    if len(set(servers)) < len(servers):
        twice = next(each for each in servers if servers.count(each) > 1)
        raise AddressError(f"server {_short(server)} names {twice} twice; give each shard's HOST:PORT once")
    return tuple(found)


def is_service(address: str) -> bool:
    """Tell whether an address from :func:`expand` is one name for all shards."""
    return address.startswith(SERVICE_PREFIX)


def split(address: str) -> tuple[str, int]:
    """Return host, without brackets, and port; raises :class:`AddressError` if it is not ``HOST:PORT``."""
    host, colon, port = address.removeprefix(SERVICE_PREFIX).rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        advice = "workers are served on port 50051 unless --listen says otherwise"
        raise _error(address, f" is not HOST:PORT with a port of 1 to 65535; {advice}")
    if host.startswith("[") and host.endswith("]") and "%" not in host:
        try:
            return str(ipaddress.IPv6Address(host[1:-1])), int(port)
        except ValueError:
            raise _error(address, ": between the brackets is no IPv6 address") from None
    if ":" in host and not {"/", "%"} & {*host}:
        raise _error(address, f" is not HOST:PORT; write an IPv6 address in brackets: [{host}]:{port}")
    if len(host) > _LONGEST_NAME or not _NAME.fullmatch(host):
        advice = "a host is a DNS name, an IPv4 address, or an IPv6 address in brackets"
        raise _error(address, f" is not HOST:PORT; {advice}")
    return host, int(port)


def _names_a_service(address: str) -> bool:
    """Tell whether an address has the form ``dns:///``, and a name rather than an IP address."""
    if not address.startswith(SERVICE_PREFIX):
        return False
    try:
        ipaddress.ip_address(split(address)[0])
    except ValueError:
        return True
    return False


def _servers(address: str) -> list[str]:
    return [address] if is_service(address) else address.split(SEPARATOR)


def _expand(word: str) -> list[str]:
    """Return the addresses that one word stands for, each of one server or of several that stand for one another."""
    servers = [_expand_range(each) for each in _servers(word.removeprefix(SERVICE_PREFIX))]
    if len(servers) == 1:
        return _expand_range(word)
    if len({len(each) for each in servers}) > 1:
        raise _error(word, ": the servers between the slashes stand for one another, so their ranges are of one length")
    return [SEPARATOR.join(each) for each in zip(*servers, strict=True)]


def _expand_range(address: str) -> list[str]:
    """Return the addresses of a range in braces; the address itself without one."""
    if not ("{" in address or "}" in address):
        return [address]
    ranges = list(_RANGE.finditer(address))
    if len(ranges) != 1 or address.count("{") != 1 or address.count("}") != 1:
        raise _error(address, ": one range of whole numbers in braces is possible, as in ps-{0..3}.ps:50051")
    ends = _ENDS.fullmatch(ranges[0][1])
    if ends is None:
        raise _error(address, ": write the first and the last number in the braces, as in {0..3} for four shards")
    first, last = int(ends[1]), int(ends[2])
    if not first <= last < first + MOST_SHARDS:
        limit = f"names at most {MOST_SHARDS} shards"
        raise _error(address, f": a range goes upwards and {limit}; for four write {{0..3}}")
    before, after = address[: ranges[0].start()], address[ranges[0].end() :]
    return [f"{before}{number}{after}" for number in range(first, last + 1)]


def _error(address: str, fault: str) -> AddressError:
    return AddressError(f"server address {_short(address)}{fault}")


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")

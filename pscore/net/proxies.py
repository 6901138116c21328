"""The proxy of the environment, which gRPC takes for every channel: never for this machine, and told of elsewhere.

gRPC reads ``grpc_proxy``, ``https_proxy`` and ``http_proxy``, the first that is there, also if it is empty, and leaves
the hosts of ``no_grpc_proxy`` or ``no_proxy`` out. A proxy whose URL does not begin with ``http://`` is not used.
"""

import functools
import ipaddress
import os
import queue
import socket
import threading
import urllib.request
from typing import Any

from pscore.names import escaped

NO_PROXY: tuple[tuple[str, Any], ...] = (("grpc.enable_http_proxy", 0),)
"""gRPC's options for a channel that uses no proxy."""

_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
_SCHEME = "http://"
_LOOKUP_SECONDS = 2.0


def proxy_options(address: str) -> tuple[tuple[str, Any], ...]:
    """Return the options of a channel to ``HOST:PORT``: :data:`NO_PROXY`, or none if it uses the environment's."""
    return () if _proxy_for(address) else NO_PROXY


def told_of_proxy(address: str) -> str:
    """Return the end of a sentence about a failed call: that a proxy is used, and how to leave it out; or nothing."""
    found = _proxy_for(address)
    if found is None:
        return ""
    variable, proxy = found
    host = _host_of(address)
    return f"; the call went through the proxy {proxy} ({variable} in the environment): no_proxy={host} leaves it out"


def _proxy_for(address: str) -> tuple[str, str] | None:
    """Return the variable that names the proxy for an address, and the proxy without user and password."""
    variable = next((name for name in _VARIABLES if name in os.environ), None)
    if variable is None or not os.environ[variable].lower().startswith(_SCHEME):
        return None
    host = _host_of(address)
    exceptions = next((os.environ[name] for name in _EXCEPTIONS if os.environ.get(name)), "")
    if urllib.request.proxy_bypass_environment(host, {"no": exceptions}) or _is_here(host):  # type: ignore[attr-defined]
        return None
    return variable, escaped(_SCHEME + os.environ[variable][len(_SCHEME) :].rpartition("@")[2])


def _host_of(address: str) -> str:
    return address.removeprefix("dns:///").rpartition(":")[0].strip("[]")


@functools.lru_cache(1024)
def _is_here(host: str) -> bool:
    """Tell whether a host name or address is this machine's loopback; a name is looked up."""
    addresses = [host]
    try:
        ipaddress.ip_address(host)
    except ValueError:
        addresses = _looked_up(host)
    found = [ipaddress.ip_address(address.partition("%")[0]) for address in addresses]
    return bool(found) and all(address.is_loopback or address.is_unspecified for address in found)


def _looked_up(host: str) -> list[str]:
    """Return a host's addresses; none if they are not found in time: behind a proxy only the proxy may know them."""
    answer: queue.SimpleQueue[list[str]] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            found = []
        answer.put([str(entry[4][0]) for entry in found])

    threading.Thread(target=look_up, name="proxy-lookup", daemon=True).start()
    try:
        return answer.get(timeout=_LOOKUP_SECONDS)
    except queue.Empty:
        return []

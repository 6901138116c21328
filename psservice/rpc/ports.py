"""The ports: gRPC servers on one event loop in a thread of its own."""

import asyncio
import logging
import random
import resource
import socket
import threading
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import grpc
import grpc.aio

Result = TypeVar("Result")

_LINES_A_MINUTE = 6
_HANDSHAKE_SECONDS = 10


_lines_of_minute: Counter[int] = Counter()


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Pass few lines a minute: anybody can make gRPC log a traceback, by headers that are no UTF-8.

    None if a client has gone while gRPC sends the end of its call (``ExecuteBatchError``): no fault, and common when
    workers are killed.
    """
    if record.exc_info and type(record.exc_info[1]).__name__ == "ExecuteBatchError":
        return False
    minute = int(record.created // 60)
    if minute not in _lines_of_minute:
        _lines_of_minute.clear()
    _lines_of_minute[minute] += 1
    return _lines_of_minute[minute] <= _LINES_A_MINUTE


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_a_line)

OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second server on the same port is an error, not a silent share
    ("grpc.max_concurrent_streams", 100),  # of one connection; what it has reset counts until it is cleared away
    ("grpc.compression_enabled_algorithms_bitset", 1),  # none: 17 KB of gzip may be a message of 4 MB
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.server_handshake_timeout_ms", 1000 * _HANDSHAKE_SECONDS),
)
"""Of every gRPC server of this process."""

_UNNAMED_PORTS = range(20_000, 30_000)
_TRIES = 100


def bind_port(host: str, port: int, bind: Callable[[int], Result], named: Collection[int] = ()) -> Result:
    """Bind a port, or for 0 any free one of 20000 to 29999 but the ``named``, and return or raise as ``bind`` does.

    Linux itself assigns higher ports, and 50051 among them: the port of a server that may be restarting.
    """
    if port:
        return bind(port)
    unnamed = [number for number in _UNNAMED_PORTS if number not in named]
    *numbers, last = random.SystemRandom().sample(unnamed, min(_TRIES, len(unnamed)))
    for number in numbers:
        with suppress(OSError, RuntimeError):
            hold_port(host, number).close()  # gRPC would log an error, and its credentials work for one try only
            return bind(number)
    return bind(last)


def hold_port(host: str, port: int) -> socket.socket:
    """Bind a port until the socket is closed; raises ``OSError`` if it is taken."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


class EventLoop:
    """An event loop in a thread of its own, which begins at once."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="grpc-loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop, and wait for it in this thread, which must not own a lock."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def close(self) -> None:
        """End the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def open_port(
    address: str, handlers: Sequence[grpc.GenericRpcHandler], credentials: grpc.ServerCredentials | None
) -> tuple[grpc.aio.Server, int]:
    """Start a gRPC server at ``HOST:PORT``, in plaintext without credentials; return it with the port's number.

    Raises ``RuntimeError`` if the address cannot be bound.
    """
    most = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)  # the other half is for files
    server = grpc.aio.server(options=[*OPTIONS, ("grpc.max_allowed_incoming_connections", most)])
    server.add_generic_rpc_handlers(tuple(handlers))
    number = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    await server.start()
    return server, number

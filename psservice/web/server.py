"""The standard library's HTTP server with few threads, one request a connection, and a limit on its time."""

import logging
import socket
import socketserver
import threading
import time
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import WSGIApplication

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 16
READ_SECONDS = 5.0
CONNECTION_SECONDS = 15.0
_POLL_SECONDS = 0.05  # how soon close() ends
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class WebServer(socketserver.ThreadingMixIn, WSGIServer):
    """Serves a WSGI application from a thread of its own; ``server_port`` is the one that was bound, also for 0.

    Raises ``OSError`` if the address cannot be bound.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, host: str, port: int, application: WSGIApplication) -> None:
        self._begun: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, address = found[0]
        super().__init__(address[:2], _Request)  # type: ignore[arg-type]  # a port and a host, also of IPv6
        self.set_app(application)
        threading.Thread(target=self.serve_forever, args=(_POLL_SECONDS,), name="web", daemon=True).start()

    def close(self) -> None:
        """End the thread and close the port."""
        self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        """Bind without asking the name service for this machine's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, or with 503 if all threads are in use."""
        with self._lock:
            is_free = len(self._begun) < MOST_CONNECTIONS
            if is_free:
                self._begun[request] = time.monotonic()
        if is_free:
            super().process_request(request, client_address)
            return
        request.settimeout(READ_SECONDS)
        try:
            request.sendall(_BUSY)
        except OSError as error:
            log.debug("a connection was lost", extra={"error": str(error)})
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and free the connection's place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._begun.pop(request, None)

    def service_actions(self) -> None:
        """Cut connections that last too long, busy ones too."""
        now = time.monotonic()
        with self._lock:
            for request in [each for each, begun in self._begun.items() if now - begun > CONNECTION_SECONDS]:
                try:
                    request.shutdown(socket.SHUT_RDWR)
                except OSError as error:
                    log.debug("a connection was gone", extra={"error": str(error)})

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over clients that have gone or are too slow."""
        log.debug("a request could not be answered", exc_info=True)


class _Request(WSGIRequestHandler):
    timeout = READ_SECONDS
    server_version, sys_version = "psservice", ""

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log no ordinary requests: a scrape comes every few seconds."""

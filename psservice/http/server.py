"""A small HTTP server that nobody can occupy: few threads, one request a connection, and a limit on its time."""

import logging
import socket
import socketserver
import threading
import time
from typing import IO, Any, cast
from wsgiref.handlers import SimpleHandler
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import WSGIApplication

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 16
READ_SECONDS = 5.0
CONNECTION_SECONDS = 15.0
_POLL_SECONDS = 0.5
_LONGEST_LINE = 8192
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class WebServer:
    """Serves a WSGI application from a thread of its own.

    Args:
        host: where to listen.
        port: 0 picks a free one.
        application: what answers.

    Attributes:
        port: the one that was bound.

    Raises:
        OSError: the address cannot be had.
    """

    def __init__(self, host: str, port: int, application: WSGIApplication) -> None:
        """Bind and begin to serve."""
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        kind = type("_Server", (_Server,), {"address_family": family})
        self._server: _Server = kind(address[:2], _Request)
        self._server.set_app(application)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(_POLL_SECONDS,), name="web", daemon=True).start()

    def close(self) -> None:
        """Stop to serve."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, *arguments: Any) -> None:
        self._places = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._begun: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def server_bind(self) -> None:
        """Bind without asking the name service what this machine is called."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, where there is one left."""
        if not self._places.acquire(blocking=False):
            request.settimeout(READ_SECONDS)
            try:
                request.sendall(_BUSY)
            except OSError as error:
                log.debug("a connection was lost", extra={"error": str(error)})
            self.shutdown_request(request)
            return
        with self._lock:
            self._begun[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room for the next."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._begun.pop(request, None)
            self._places.release()

    def service_actions(self) -> None:
        """Cut connections that take too long, however busily they do."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, begun in self._begun.items() if now - begun > CONNECTION_SECONDS]
            for request in late:
                try:
                    request.shutdown(socket.SHUT_RDWR)
                except OSError as error:
                    log.debug("a connection was gone", extra={"error": str(error)})

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Pass over clients that are gone or too slow."""
        log.debug("a request could not be answered", exc_info=True)


class _Answer(SimpleHandler):
    server_software = "psservice"
    http_version = "1.0"

    def log_exception(self, exc_info: Any) -> None:
        """Log what the application raises."""
        log.error("a page could not be made", exc_info=exc_info)


class _Request(WSGIRequestHandler):
    timeout = READ_SECONDS
    server_version, sys_version = "psservice", ""

    def handle(self) -> None:
        """Answer one request."""
        self.raw_requestline = self.rfile.readline(_LONGEST_LINE + 1)
        if len(self.raw_requestline) > _LONGEST_LINE:
            self.requestline, self.request_version, self.command = "", "", ""
            self.send_error(414)
            return
        if not self.parse_request():
            return
        server: Any = self.server
        streams = cast(IO[bytes], self.rfile), cast(IO[bytes], self.wfile)
        answer = _Answer(*streams, self.get_stderr(), self.get_environ(), multithread=True)
        answer.run(server.get_app())

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing of ordinary requests: a scrape comes every few seconds."""

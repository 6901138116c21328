"""The pages: ``/metrics`` for Prometheus, ``/`` for people, and what that page reads.

That is ``/status.json``, and the past: ``/recent.json`` (ten minutes) and ``/history.json`` (since the start).
"""

import base64
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable
from importlib import resources
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.observability.history import History, columns
from psservice.observability.protojson import plain

log = logging.getLogger(__name__)

_COMMON = [("Server", "psservice"), ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff")]
_PATHS = b"there are /, /status.json, /recent.json, /history.json and /metrics\n"
_PAGE_HEADERS = [
    ("Referrer-Policy", "no-referrer"),
    ("X-Frame-Options", "DENY"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
]


def application(
    registry: CollectorRegistry, report: Callable[[], pb.GetStatusResponse], history: History
) -> WSGIApplication:
    """Return the WSGI application over these metrics, this status and this past; no request changes anything."""
    metrics: WSGIApplication = make_wsgi_app(registry)
    page = resources.files("psservice.web").joinpath("status.html").read_bytes()
    page_headers = [("Content-Security-Policy", content_security_policy(page.decode())), *_PAGE_HEADERS]

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]

        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Callable[[bytes], object]:
            return start_response(status, [*headers, *_COMMON], *rest)

        def send(status: str, kind: str, body: bytes, headers: list[tuple[str, str]]) -> Iterable[bytes]:
            start(status, [("Content-Type", kind), ("Content-Length", str(len(body))), *headers])
            return [body]

        def send_json(value: Any) -> Iterable[bytes]:
            return send("200 OK", "application/json", json.dumps(value).encode(), _PAGE_HEADERS)

        def read(path: str) -> Iterable[bytes]:
            match path:
                case "/metrics":
                    return metrics({**environ, "REQUEST_METHOD": "GET"}, start)
                case "/":
                    return send("200 OK", "text/html; charset=utf-8", page, page_headers)
                case "/status.json":
                    return send_json(plain(report()))
                case "/recent.json":
                    return send_json(columns(history.recent()))
                case "/history.json":
                    return send_json(columns(history.whole()))
                case _:
                    return send(
                        "404 Not Found",
                        "text/plain",
                        _PATHS,
                        [],
                    )

        if method not in ("GET", "HEAD"):
            return send("405 Method Not Allowed", "text/plain", b"only GET and HEAD\n", [("Allow", "GET, HEAD")])
        try:
            body = read(environ.get("PATH_INFO", "/"))
        except Exception:
            log.exception("a page could not be made")
            body = send("500 Internal Server Error", "text/plain", b"the server's log has the details\n", [])
        return [] if method == "HEAD" else body

    return answer


def content_security_policy(page: str) -> str:
    """Return a policy that lets a page run its own script and style, ask its own server, and nothing else."""
    own = {}
    for tag in ("script", "style"):
        digests = (hashlib.sha256(each.encode()) for each in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL))
        own[tag] = " ".join(f"'sha256-{base64.b64encode(each.digest()).decode()}'" for each in digests)
    return (
        f"default-src 'none'; script-src {own['script']}; style-src {own['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

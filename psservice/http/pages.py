"""The pages: ``/metrics`` for Prometheus, ``/`` for people, and ``/status.json``, which that page reads."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from importlib import resources
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.observability.protojson import plain

_COMMON = [("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff")]
_READING = ("GET", "HEAD")
_PAGE_HEADERS = [
    ("Referrer-Policy", "no-referrer"),
    ("X-Frame-Options", "DENY"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
]


def application(registry: CollectorRegistry, report: Callable[[], pb.GetStatusResponse]) -> WSGIApplication:
    """Return what answers requests; it changes nothing, whoever asks.

    Args:
        registry: the metrics.
        report: returns the status.
    """
    metrics: WSGIApplication = make_wsgi_app(registry)
    page = resources.files("psservice.http").joinpath("status.html").read_bytes()
    page_headers = [("Content-Security-Policy", content_security_policy(page.decode())), *_PAGE_HEADERS]

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        def send(status: str, kind: str, body: bytes, *headers: tuple[str, str]) -> Iterable[bytes]:
            length = ("Content-Length", str(len(body)))
            start_response(status, [("Content-Type", kind), length, *_COMMON, *headers])
            return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

        if environ["REQUEST_METHOD"] not in _READING:
            return send("405 Method Not Allowed", "text/plain", b"only GET and HEAD\n", ("Allow", "GET, HEAD"))
        match environ.get("PATH_INFO", "/"):
            case "/metrics":
                return _with_headers(metrics, environ, start_response)
            case "/":
                return send("200 OK", "text/html; charset=utf-8", page, *page_headers)
            case "/status.json":
                return send("200 OK", "application/json", json.dumps(plain(report())).encode(), *_PAGE_HEADERS)
            case _:
                return send("404 Not Found", "text/plain", b"there are /, /status.json and /metrics\n")

    return answer


def _with_headers(metrics: WSGIApplication, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    """Answer with the metrics, under our headers too; their application knows no HEAD."""

    def begin(status: str, headers: list[tuple[str, str]], *rest: Any) -> Callable[[bytes], object]:
        return start_response(status, [*headers, *_COMMON], *rest)

    body = metrics({**environ, "REQUEST_METHOD": "GET"}, begin)
    return [] if environ["REQUEST_METHOD"] == "HEAD" else body


def content_security_policy(page: str) -> str:
    """Return a policy that lets a page run its own script and style, ask its own server, and nothing else."""
    own = {
        tag: " ".join(f"'sha256-{_hash(text)}'" for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL))
        for tag in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src {own['script']}; style-src {own['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

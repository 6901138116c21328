"""The metrics port under callers who mean no good: it changes nothing, gives nothing away, and cannot be occupied."""

import http.client
import json
import re
import socket
import threading
import time

import pytest
from prometheus_client import CollectorRegistry, Counter

from pscore.wire.v1 import parameter_server_pb2 as pb
from psservice.observability.history import History
from psservice.web import server as web
from psservice.web.pages import application
from psservice.web.server import WebServer
from tests.system.tools import wait_until

HOSTILE = "<script>alert(1)</script>\"'&`"


def report():
    return pb.GetStatusResponse(num_shards=1, workers=[pb.WorkerStatus(worker_id=HOSTILE)])


@pytest.fixture(scope="module")
def served():
    """A server over one counter and a status with a hostile name."""
    registry = CollectorRegistry()
    Counter("things", "Things", registry=registry)
    server = WebServer("127.0.0.1", 0, application(registry, report, History()))
    yield server
    server.close()


def ask(server, method="GET", path="/", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def send(server, data):
    """Send bytes as they are; return what comes back until the connection ends."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
        connection.sendall(data)
        found = b""
        while piece := connection.recv(65536):
            found += piece
        return found


@pytest.mark.parametrize("path", ["/", "/status.json", "/recent.json", "/history.json", "/metrics", "/nothing"])
def test_every_answer_forbids_what_a_browser_might_do_with_it(path, served):
    answer, _ = ask(served, path=path)
    assert answer.status == (404 if path == "/nothing" else 200)
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Server"] == "psservice"


def test_the_page_may_ask_its_own_server_only_and_has_no_name_in_it(served):
    answer, page = ask(served)
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert re.fullmatch(r"'sha256-[\w+/=]+'", policy["script-src"])
    assert not re.search(rb"(https?:)?//[a-z]|\son[a-z]+=|style=|innerHTML|document\.write|eval\(", page)
    assert HOSTILE.encode() not in page
    assert json.loads(ask(served, path="/status.json")[1])["workers"][0]["worker_id"] == HOSTILE


def test_metrics_are_where_they_were(served):
    answer, text = ask(served, path="/metrics?name[]=things_total")
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert b"things_total 0.0" in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW"])
def test_there_is_nothing_to_be_changed(method, served):
    answer, _ = ask(served, method, "/")
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/", "/status.json", "/metrics"])
def test_a_head_is_answered_without_a_body(path, served):
    answer, body = ask(served, "HEAD", path)
    assert (answer.status, body) == (200, b"")


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n",
        b"GET /" + b"a" * 10_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"GET /../../etc/passwd HTTP/1.1\r\n\r\n",
        b"GET /%2e%2e/%00 HTTP/1.1\r\n\r\n",
        b"GET http://elsewhere/ HTTP/1.1\r\nHost: elsewhere\r\n\r\n",
    ],
)
def test_what_is_no_request_ends_with_its_connection(data, served):
    found = send(served, data)
    assert not found or re.match(rb"HTTP/1.0 4\d\d ", found) or re.search(rb"Error code: (4\d\d|505)", found)
    assert b"Traceback" not in found
    assert ask(served)[0].status == 200


def test_a_page_that_fails_tells_nothing(served):
    def broken():
        raise RuntimeError("secret")

    server = WebServer("127.0.0.1", 0, application(CollectorRegistry(), broken, History()))
    try:
        answer, body = ask(server, path="/status.json")
        assert answer.status == 500
        assert b"secret" not in body
        assert b"Traceback" not in body
    finally:
        server.close()


def request_threads():
    """Threads of the standard library that serve a connection each; others of this process come and go."""
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_slow_clients_are_cut_and_take_no_more_than_their_places(served, monkeypatch):
    monkeypatch.setattr(web, "CONNECTION_SECONDS", 600.0)
    monkeypatch.setattr(web._Request, "timeout", 600.0)
    before = request_threads()
    slow = [
        socket.create_connection(("127.0.0.1", served.server_port), timeout=30) for _ in range(web.MOST_CONNECTIONS)
    ]
    try:
        for connection in slow:
            connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        wait_until(lambda: request_threads() >= before + web.MOST_CONNECTIONS)
        assert status_of(served) != 200, "every place is taken"
        assert request_threads() <= before + web.MOST_CONNECTIONS
        monkeypatch.setattr(web, "CONNECTION_SECONDS", 0.1)
        for connection in slow:  # each goes on to send a little, which a limit on silence would not notice
            assert drip(connection, 60)
        monkeypatch.setattr(web, "CONNECTION_SECONDS", 600.0)
        wait_until(lambda: status_of(served) == 200)
    finally:
        for connection in slow:
            connection.close()


def status_of(server):
    """The status of the page; ``None`` where the connection is closed on us."""
    try:
        return ask(server)[0].status
    except (OSError, http.client.HTTPException):
        return None


def drip(connection, seconds):
    """Send a byte now and then; tell whether the other side had enough of it in time."""
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            connection.sendall(b"a")
            time.sleep(0.05)
    except OSError:
        return True
    return False

"""A server of vLLM, as whoever publishes a feed talks to it: over HTTP, with names of versions alone."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult, urlsplit

from psclient.errors import ConfigurationError, EngineError

_CONNECT_SECONDS = 10.0
_CONTROL_SECONDS = 300.0
_LONGEST_ANSWER = 2000  # bytes of it that an error repeats
_NO_ROUTE = '; start vLLM with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "sparseps"}\''


class VllmServer:
    """The weight updates of one ``vllm serve`` with ``VLLM_SERVER_DEV_MODE=1`` and the backend ``sparseps``.

    Args:
        url: of the server: ``http://host:8000``.
        init_info: what its workers need to follow the feed (:class:`~psclient.integrations.vllm_engine.FeedInitInfo`):
            ``{"server": "host:50051"}``.
        seconds: that an update may take, all its calls together. Each other call may take 300 seconds.

    Raises:
        ConfigurationError: the URL is none, or has a name, a password or a query in it; or ``init_info`` cannot be sent
            as JSON, or has a token in its settings.
    """

    def __init__(self, url: str, init_info: Mapping[str, Any], seconds: float = 1800.0) -> None:
        parts = _parts_of(url)
        try:
            json.dumps(dict(init_info))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"init_info= is sent as JSON: {error}; name paths as strings") from None
        require_no_token(init_info.get("settings"))
        self.url = url.rstrip("/")
        self._connection_class = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._path = parts.netloc, parts.path.rstrip("/")
        self._init_info, self._seconds = dict(init_info), seconds

    def pause(self) -> None:
        """Hold the requests that are under way; they go on with the next version."""
        self._post("/pause?mode=keep")

    def resume(self) -> None:
        """Go on with the requests."""
        self._post("/resume")

    def update(self, weight_version: str) -> None:
        """Have every worker install a version; workers that do not follow the feed yet are first told to.

        Raises:
            EngineError: it does not answer in time, it refuses, or a worker could not install the version.
        """
        end = time.monotonic() + self._seconds

        def post(path: str, body: Mapping[str, Any], seconds: float = _CONTROL_SECONDS) -> None:
            self._post(path, body, min(seconds, end - time.monotonic()))

        try:
            post("/start_weight_update", {})
        except EngineError:  # it was started again, or another update was never finished
            with contextlib.suppress(EngineError):
                post("/finish_weight_update", {})
            post("/init_weight_transfer_engine", {"init_info": self._init_info})
            post("/start_weight_update", {})
        try:
            post("/update_weights", {"update_info": {"weight_version": weight_version}}, self._seconds)
        except EngineError:
            with contextlib.suppress(EngineError):  # without a name: the version is not there
                post("/finish_weight_update", {})
            raise
        post("/finish_weight_update", {"weight_version": weight_version})

    def _post(self, path: str, body: Mapping[str, Any] | None = None, seconds: float = _CONTROL_SECONDS) -> None:
        """Make a call; raises :class:`EngineError`, at the latest after so many seconds, however the answer comes."""
        if seconds <= 0:
            raise EngineError(self.url, f"POST {path} was not made: the time of the update is over")
        headers = {} if body is None else {"Content-Type": "application/json"}
        data = b"" if body is None else json.dumps(body)
        connection = self._connection_class(self._host, timeout=min(_CONNECT_SECONDS, seconds))
        is_late = threading.Event()
        try:
            connection.connect()
            connection.sock.settimeout(seconds)
            with _ended_after(connection.sock, seconds, is_late):
                connection.request("POST", self._path + path, data, headers)
                answer = connection.getresponse()
                said = answer.read(_LONGEST_ANSWER).decode(errors="replace")
        except (OSError, HTTPException, ValueError) as error:  # out of reach, out of time, no HTTP, or no such host
            why = "timed out" if is_late.is_set() else repr(error)
            raise EngineError(self.url, f"POST {path} was not answered by vLLM: {why}") from error
        finally:
            connection.close()
        if answer.status != HTTPStatus.OK:
            hint = _NO_ROUTE if answer.status == HTTPStatus.NOT_FOUND else ""
            raise EngineError(self.url, f"POST {path} was answered {answer.status}: {said}{hint}")


def require_no_token(settings: object) -> None:
    """Refuse settings of a follower with a token in them, which others may log (:class:`ConfigurationError`)."""
    if isinstance(settings, Mapping) and "token" in settings:
        raise ConfigurationError("name a file with the token (token_file), which is read on the worker's machine")


def _parts_of(url: str) -> SplitResult:
    """Return the parts of an engine's URL; raises :class:`ConfigurationError`, without what may be secret in it."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, or an address with one bracket
        parts, is_one = SplitResult("", "", "", "", ""), False
    if not is_one or not url.isascii() or "@" in url or "?" in url or "#" in url:
        said = "one with a name, a password or a query" if {"@", "?", "#"} & {*url} else repr(url)
        raise ConfigurationError(f"an engine is named by its URL, as http://host:8000, not {said}")
    return parts


@contextlib.contextmanager
def _ended_after(sock: socket.socket, seconds: float, is_late: threading.Event) -> Iterator[None]:
    """Shut a connection down after so many seconds, also if the other end sends a little again and again."""

    def end() -> None:
        is_late.set()
        with contextlib.suppress(OSError):  # it has ended
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

"""A server of vLLM, as whoever publishes a feed talks to it: over HTTP, with names of versions alone."""

import contextlib
import json
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

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
        seconds: that an update may take.

    Raises:
        ConfigurationError: the URL is none, or has a name or a password in it.
    """

    def __init__(self, url: str, init_info: Mapping[str, Any], seconds: float = 1800.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ConfigurationError(f"an engine is named by its URL, as http://host:8000, not {url!r}")
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
        try:
            self._post("/start_weight_update", {})
        except EngineError:  # it was started again, or another update was never finished
            with contextlib.suppress(EngineError):
                self._post("/finish_weight_update", {})
            self._post("/init_weight_transfer_engine", {"init_info": self._init_info})
            self._post("/start_weight_update", {})
        try:
            self._post("/update_weights", {"update_info": {"weight_version": weight_version}}, self._seconds)
        except EngineError:
            with contextlib.suppress(EngineError):  # without a name: the version is not there
                self._post("/finish_weight_update", {})
            raise
        self._post("/finish_weight_update", {"weight_version": weight_version})

    def _post(self, path: str, body: Mapping[str, Any] | None = None, seconds: float = _CONTROL_SECONDS) -> None:
        headers = {} if body is None else {"Content-Type": "application/json"}
        data = b"" if body is None else json.dumps(body)
        connection = self._connection_class(self._host, timeout=_CONNECT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(seconds)
            connection.request("POST", self._path + path, data, headers)
            answer = connection.getresponse()
            said = answer.read(_LONGEST_ANSWER).decode(errors="replace")
        except (OSError, HTTPException) as error:  # out of reach, out of time, or no HTTP
            raise EngineError(self.url, f"POST {path} was not answered by vLLM: {error!r}") from error
        finally:
            connection.close()
        if answer.status != HTTPStatus.OK:
            hint = _NO_ROUTE if answer.status == HTTPStatus.NOT_FOUND else ""
            raise EngineError(self.url, f"POST {path} was answered {answer.status}: {said}{hint}")

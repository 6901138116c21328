"""Channels to a server: plaintext or TLS, with or without a bearer token; the same for workers and operators."""

import ipaddress
import logging
import ssl
import stat
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import grpc

from pscore.names import escaped
from pscore.net import forks
from pscore.net.proxies import proxy_options, told_of_proxy

log = logging.getLogger(__name__)

OptionPairs = Sequence[tuple[str, Any]]
Headers = Sequence[tuple[str, str]]


class ChannelError(Exception):
    """A channel cannot be secured as asked; the message names the setting to change."""


@dataclass(frozen=True, slots=True)
class Security:
    """How a caller protects a channel and identifies itself.

    Without ``ca``, from which the server's certificate must descend, the channel is plaintext. ``cert`` and ``key`` are
    the caller's own, for mutual TLS; ``server_name`` is that of the server's certificate, if the address has
    another. ``token_file`` wins over ``token``, and is read again whenever it has changed. All files are PEM but the
    token's.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""
    token: str = field(default="", repr=False)
    token_file: Path | None = None
    _held: "_TokenFile | None" = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.token_file is not None:
            object.__setattr__(self, "_held", _TokenFile(self.token_file))

    def read_token(self) -> str:
        """Return the token to send now, empty if there is none. Thread-safe.

        A file that has changed and holds no token leaves the one that was read before in use. Raises
        :class:`ChannelError` if there is none before, or if no header can hold the token.
        """
        if self._held is not None:
            return self._held.read()
        if not self.token.isascii() or not self.token.isprintable():
            raise ChannelError("the token holds characters that no header can; is PSCLIENT_TOKEN one line?")
        return self.token


class _TokenFile:
    """The token of a file, which is read again when the file changes: tokens are rotated while workers train."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._stamp: FileStamp | None = None
        self._token = ""

    def read(self) -> str:
        """Return the token; see :meth:`Security.read_token`."""
        stamp = stamp_of(self._path)
        with self._lock:
            if stamp != self._stamp:
                try:
                    self._token = self._read()
                except ChannelError as error:
                    if not self._token:
                        raise
                    log.warning("%s; the token before stays in use", error)
                self._stamp = stamp
            return self._token

    def _read(self) -> str:
        warn_of_readers(self._path)
        token = _read(self._path, "token").decode("utf-8", "replace").strip()
        if not token or not token.isascii() or not token.isprintable():
            raise ChannelError(f"{self._path} does not hold one line with a token")
        return token


FileStamp = tuple[int, int, int]


def stamp_of(path: Path) -> FileStamp:
    """Return what differs once a file, or who may read it, has changed; zeros for a file that is not there."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_size, found.st_ctime_ns)


@cache
def warn_of_readers(path: Path) -> None:
    """Warn, once a process, of a secret file that every user of this machine can read."""
    with suppress(OSError):
        if path.stat().st_mode & stat.S_IROTH:
            log.warning("every user of this machine can read %s: chmod o-r %s", path, path)


_ADVICE = {
    "Hostname Verification Check failed": "its certificate is made out to another name; use that, or name it "
    "(PSCLIENT_TLS_SERVER_NAME)",
    "certificate has expired": "its certificate, or the CA's, must be renewed (the server reads a new --tls-cert by "
    "itself), or this machine's clock is wrong",
    "CERTIFICATE_VERIFY_FAILED": "its certificate does not descend from the CA that was named (PSCLIENT_TLS_CA)",
    "WRONG_VERSION_NUMBER": "it does not speak TLS: name no CA (PSCLIENT_TLS_CA), or this is another port",
    "Socket closed": "if it speaks TLS, name its CA (PSCLIENT_TLS_CA); if it asks for certificates, yours too "
    "(PSCLIENT_TLS_CERT, PSCLIENT_TLS_KEY), which must not have expired",
    "Failed parsing HTTP/2": "it does not speak gRPC: is this the port for workers (--listen), or that of the metrics?",
}
"""Advice by a part of gRPC's words; the first that fits."""


NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""Statuses of calls that have not reached a server, or have lost it."""


def advice(detail: str) -> str:
    """Return what to change if gRPC's words show that trying again will not help; else an empty text."""
    if "failed to connect" not in detail:
        return ""
    return next((advice for text, advice in _ADVICE.items() if text in detail), "")


def explain(error: grpc.RpcError, address: str) -> str:
    """Return gRPC's words on a failed call, escaped for a terminal or a log, and :func:`advice`; and of a proxy."""
    detail = escaped(error.details() or "")
    words = "; ".join(filter(None, (detail, advice(detail))))
    return words + told_of_proxy(address) if error.code() in NO_ANSWER else words


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address is this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def open_channel(address: str, security: Security, options: OptionPairs = (), headers: Headers = ()) -> grpc.Channel:
    """Open a channel to ``HOST:PORT``, with gRPC's options and metadata of every call; nothing is dialled yet.

    Raises:
        ChannelError: a file cannot be read or is not what it should be, a token would travel in plaintext beyond
            this machine, or this process was forked from one that has opened a channel.
    """
    if forks.is_child_of_user():
        raise ChannelError(forks.REFUSED)
    forks.note_channel()
    token = security.read_token()
    options = [*options, *proxy_options(address)]
    if security.ca is None:
        if security.cert or security.key:
            raise ChannelError("a client certificate needs TLS: name the server's CA too (--tls-ca, PSCLIENT_TLS_CA)")
        host = address.removeprefix("dns:///").rpartition(":")[0].strip("[]")
        if token and not is_loopback(host):
            raise ChannelError(
                f"the token would travel to {address} in plaintext; name the server's CA (--tls-ca, PSCLIENT_TLS_CA), "
                "or use no token"
            )
        channel = grpc.insecure_channel(address, options=options)
    else:
        if (security.cert is None) != (security.key is None):
            raise ChannelError(
                "a client certificate and its key are given together (--tls-cert and --tls-key, PSCLIENT_TLS_CERT and "
                "PSCLIENT_TLS_KEY)"
            )
        if security.key:
            warn_of_readers(security.key)
        credentials = grpc.ssl_channel_credentials(
            _read(security.ca, "CA"),
            _read(security.key, "key") if security.key else None,
            _read(security.cert, "certificate") if security.cert else None,
        )
        _check_files(security.ca, security.cert, security.key)
        names = (("grpc.ssl_target_name_override", security.server_name),) if security.server_name else ()
        channel = grpc.secure_channel(address, credentials, options=[*options, *names])
    return grpc.intercept_channel(channel, _Headers(headers, security)) if headers or token else channel


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ChannelError(f"cannot read the {what} file {path}: {error.strerror}") from error


def _check_files(ca: Path, cert: Path | None, key: Path | None) -> None:
    """Refuse files that cannot be used; gRPC would with the first call, and less clearly."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise ChannelError(
            f"{ca} holds no certificate of a CA in PEM form (--tls-ca, PSCLIENT_TLS_CA): {error.reason}"
        ) from error
    if cert is not None and key is not None:
        try:
            context.load_cert_chain(cert, key, password="")  # a key with a password is refused, and not asked for
        except ssl.SSLError as error:
            raise ChannelError(
                f"{cert} and {key} are not a certificate and its key in PEM form without a password: "
                f"{error.reason or error}"
            ) from error


class _Headers(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds metadata to every call; a token too, since gRPC sends call credentials over TLS only, even to loopback.

    The token is that of the moment in which the call begins; a stream keeps it.
    """

    def __init__(self, headers: Headers, security: Security) -> None:
        self._headers, self._security = tuple(headers), security

    def _add(self, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        metadata = [*(details.metadata or ()), *self._headers]
        if token := self._security.read_token():
            metadata.append(("authorization", f"Bearer {token}"))
        return continuation(details._replace(metadata=metadata), request)  # gRPC's details are a named tuple

    intercept_unary_unary = _add  # type: ignore[assignment]
    intercept_unary_stream = _add  # type: ignore[assignment]
    intercept_stream_unary = _add  # type: ignore[assignment]
    intercept_stream_stream = _add  # type: ignore[assignment]

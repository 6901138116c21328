"""Who may call what: TLS from files that may change, and bearer tokens with roles.

A token belongs to a role, and perhaps to one worker. Memory has only hashes of tokens, and logs have nothing of them.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import grpc

from pscore.net.channels import warn_of_readers
from pscore.wire.errors import ErrorCode, Rejected

log = logging.getLogger(__name__)

_RELOAD_SECONDS = 1.0  # between two checks of the token file

_HASHED = "sha256:"


class SecurityError(Exception):
    """A certificate, a key or a token file cannot be used; the message names it."""


class Role(IntEnum):
    """What a caller may do; each role includes those before."""

    READER = 1
    WORKER = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls; ``worker`` is the only worker that the caller may be, empty for any."""

    role: Role
    worker: str = ""


ANONYMOUS_ADMIN = Caller(Role.ADMIN)
"""Every caller of a server without tokens."""


class TokenFile:
    """The tokens of a file, read again when it changes.

    A line is ``ROLE TOKEN [WORKER]``; ``#`` begins a comment. ``sha256:`` and the hexadecimal hash of a token may stand
    for the token. A change that cannot be read leaves the old tokens in force, and is logged. ``clock`` returns
    monotonic seconds.

    Raises:
        SecurityError: the file cannot be read now.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the file."""
        self._path, self._clock = path, clock
        self._lock = threading.Lock()
        self._stamp = _stamp(path)
        self._checked = clock()
        warn_of_readers(path)
        self._callers = read_tokens(path)

    def caller(self, token: str) -> Caller | None:
        """Return the caller with this token; ``None`` for an unknown one."""
        self._reload()
        return self._callers.get(hashlib.sha256(token.encode()).digest())

    def admin_keys(self) -> list[bytes]:
        """Return the hashes of the admins' tokens: servers that share the file have them, and workers do not."""
        self._reload()
        return sorted(digest for digest, caller in self._callers.items() if caller.role is Role.ADMIN)

    def _reload(self) -> None:
        with self._lock:
            if self._clock() - self._checked < _RELOAD_SECONDS:
                return
            self._checked = self._clock()
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            try:
                self._callers = read_tokens(self._path)
            except SecurityError as error:
                log.error(
                    "the token file has changed and cannot be used; the old tokens stay", extra={"why": str(error)}
                )
                return
            self._stamp = stamp
            log.info("tokens read again", extra={"tokens": len(self._callers)})


def read_tokens(path: Path) -> dict[bytes, Caller]:
    """Return callers by the SHA-256 of their tokens.

    Raises:
        SecurityError: the file cannot be read; the message has file and line, and nothing of a token.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SecurityError(f"cannot read the token file {path}: {error}") from error
    callers: dict[bytes, Caller] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) not in (2, 3) or words[0].upper() not in Role.__members__:
            raise SecurityError(
                f"{path}, line {number}: not `ROLE TOKEN [WORKER]` with a role of reader, worker, admin"
            )
        role, token = Role[words[0].upper()], words[1]
        if token.startswith(_HASHED):
            try:
                digest = bytes.fromhex(token.removeprefix(_HASHED))
            except ValueError:
                digest = b""
            if len(digest) != hashlib.sha256().digest_size:
                raise SecurityError(f"{path}, line {number}: {_HASHED} is not followed by 64 hexadecimal digits")
        else:
            digest = hashlib.sha256(token.encode()).digest()
        if digest in callers:
            raise SecurityError(f"{path}, line {number}: this token stands in another line too")
        callers[digest] = Caller(role, words[2] if len(words) == 3 else "")
    if not callers:
        raise SecurityError(f"{path} holds no token, so nobody could call; leave --tokens out to let everybody in")
    return callers


class Authenticator:
    """Admits callers by their tokens, or everybody where there is no token file."""

    def __init__(self, tokens: TokenFile | None) -> None:
        """Use these tokens."""
        self._tokens = tokens

    def server_keys(self) -> list[bytes] | None:
        """Return keys that servers have and workers have not; ``None`` without tokens."""
        return None if self._tokens is None else self._tokens.admin_keys()

    def admit(self, metadata: Iterable[tuple[str, str | bytes]], rpc: str, needed: Role) -> Caller:
        """Return who calls, by a call's headers alone.

        Raises:
            Rejected: ``UNAUTHENTICATED`` without a known token, ``PERMISSION_DENIED`` where its role is too low.
        """
        if self._tokens is None:
            return ANONYMOUS_ADMIN
        shown = next((str(value) for key, value in metadata if key.lower() == "authorization"), "")
        kind, _, token = shown.partition(" ")
        caller = self._tokens.caller(token.strip()) if kind.lower() == "bearer" else None
        if caller is None:
            why = "its token is not known" if shown else "no token came with it"
            raise Rejected(ErrorCode.UNAUTHENTICATED, f"{rpc} is for callers with a token, and {why}")
        if caller.role < needed:
            raise Rejected(
                ErrorCode.PERMISSION_DENIED, f"{rpc} needs the role {needed.name.lower()}, the token has less"
            )
        return caller


def require_worker(caller: Caller, worker_id: str) -> None:
    """Check that a caller may be this worker; raises :class:`Rejected` (``PERMISSION_DENIED``)."""
    if caller.worker and caller.worker != worker_id:
        raise Rejected(ErrorCode.PERMISSION_DENIED, f"the token is that of another worker than {worker_id!r}")


class CertificateFiles:
    """The server's certificate chain, its key, and the CA of its clients (PEM), read again when one of them changes.

    With ``client_ca``, a caller needs a certificate of that CA (mutual TLS). Raises :class:`SecurityError` where a file
    cannot be read.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        """Read the files."""
        warn_of_readers(key)
        self._paths = tuple(path for path in (cert, key, client_ca) if path is not None)
        self._stamps = self._stamp_all()
        self._mutual = client_ca is not None
        self._first = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a port; each handshake uses the files as they are then."""
        return grpc.dynamic_ssl_server_credentials(self._first, self._changed, self._mutual)  # type: ignore[arg-type]

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return another configuration where a file has changed; gRPC asks at each handshake."""
        stamps = self._stamp_all()
        if stamps == self._stamps:
            return None
        try:
            found = self._read()
        except SecurityError as error:
            log.error("certificates have changed and cannot be used; the old ones stay", extra={"why": str(error)})
            return None
        self._stamps = stamps
        log.info("certificates read again")
        return found

    def _read(self) -> grpc.ServerCertificateConfiguration:
        data = []
        for path in self._paths:
            try:
                data.append(path.read_bytes())
            except OSError as error:
                raise SecurityError(f"cannot read {path}: {error.strerror}") from error
            if b"-----BEGIN " not in data[-1]:
                raise SecurityError(f"{path} is not a PEM file")
        cert, key, *authority = data
        return grpc.ssl_server_certificate_configuration([(key, cert)], authority[0] if authority else None)

    def _stamp_all(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(_stamp(path) for path in self._paths)


def _stamp(path: Path) -> tuple[int, int, int]:
    """Return what changes when a file does; a file that is missing is one that has changed."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_size, found.st_mtime_ns)

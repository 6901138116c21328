"""Who may call what: bearer tokens and certificates with roles.

A token, or a name in a certificate, belongs to a role, and perhaps to one worker. Memory has only hashes of tokens, and
logs have nothing of them.
"""

import asyncio
import hashlib
import hmac
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pscore.net.channels import warn_of_readers
from pscore.wire.errors import ErrorCode, Rejected
from psservice.rpc.caller import Caller, Role
from psservice.rpc.certificate_names import NO_CERTIFICATE, CertificateNames, NamesOfCertificates
from psservice.rpc.certificate_roles import CertificateRoles, read_certificate_roles, unnamed
from psservice.rpc.file_watcher import FileWatcher
from psservice.rpc.watched_files import SecurityError, WatchedFiles

_MOST_UNKNOWN = 256  # calls of unknown callers that wait for a look at the file
_LOOK_SECONDS = 2.0  # after which an unknown caller is refused if the file cannot be read

_HASHED = "sha256:"
_SHOWN_DIGITS = 8
_SHARD = "Shard"  # the scheme of what shards show one another
_LOCAL_PEER = "unix:"  # what gRPC tells of a caller by a socket of this host


ANONYMOUS_ADMIN = Caller(Role.ADMIN)
"""Every caller of a server without tokens and without roles of certificates."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a caller shows: its header ``authorization``, and the names in its certificate.

    ``is_local`` tells that the call came by the socket on which the shards of one command follow shard 0, which no
    other user can enter.
    """

    authorization: str = ""
    names: CertificateNames = NO_CERTIFICATE
    is_local: bool = False


class Authenticator:
    """Admits callers by the tokens of a file and by the names in their certificates, or everybody without such files.

    A line of ``tokens`` is ``ROLE TOKEN [WORKER]``; ``sha256:`` and the hexadecimal hash of a token may stand for the
    token. A line of ``certificate_roles`` is ``ROLE NAME [WORKER]``. ``#`` begins a comment. A caller that shows a
    token is known by it, and any other by its certificate. ``watcher`` reads a file again when it changes; no other
    thread does. Raises :class:`SecurityError` if a file cannot be read.
    """

    def __init__(self, tokens: Path | None, watcher: FileWatcher, certificate_roles: Path | None = None) -> None:
        self._watcher, self._unknown = watcher, 0
        self._looked: tuple[Future[None], asyncio.Future[None]] | None = None  # the last look, as the event loop has it
        self._names = NamesOfCertificates()
        self._tokens: WatchedFiles[dict[bytes, Caller]] | None = None
        self._roles: WatchedFiles[CertificateRoles] | None = None
        if tokens is not None:
            warn_of_readers(tokens)
            self._tokens = WatchedFiles("tokens", (tokens,), lambda: read_tokens(tokens))
            watcher.watch(self._tokens.refresh)
        if certificate_roles is not None:
            self._roles = WatchedFiles(
                "roles of certificates", (certificate_roles,), lambda: read_certificate_roles(certificate_roles)
            )
            watcher.watch(self._roles.refresh)

    def credentials_of(self, context: Any) -> Credentials:
        """Return what the caller of a call shows. A certificate is read only if it counts."""
        metadata = context.invocation_metadata()
        shown = next((str(value) for key, value in metadata if key.lower() == "authorization"), "")
        has_token = bool(shown) and self._tokens is not None
        names = NO_CERTIFICATE if self._roles is None or has_token else self._names.of(context)
        return Credentials(shown if has_token else "", names, context.peer().startswith(_LOCAL_PEER))

    def shard_token(self) -> str:
        """Return the proof that a shard shows to another one with the same tokens; empty without an admin's.

        It is made of an admin's token, which shards have and workers have not, and serves readers' calls.
        """
        keys = self._shard_keys()
        return f"{_SHARD} {_shard_proof(keys[0])}" if keys else ""

    def _is_shard(self, proof: str) -> bool:
        shown = proof if proof.isascii() else ""
        return any(hmac.compare_digest(_shard_proof(key), shown) for key in self._shard_keys())

    def _shard_keys(self) -> list[bytes]:
        if self._tokens is None:
            return []
        return sorted(digest for digest, caller in self._tokens.content.items() if caller.role is Role.ADMIN)

    def shown_names(self, credentials: Credentials) -> dict[str, str]:
        """Return what names an unknown caller in the log: the beginning of its token's hash, or its certificate's."""
        kind, _, token = credentials.authorization.partition(" ")
        if kind.lower() == "bearer":
            return {"token": _name_of(_digest(token.strip()))}
        names = credentials.names.dns or credentials.names.uris
        return {"certificate": names[0]} if names else {}

    async def admit(self, credentials: Credentials, rpc: str, needed: Role) -> Caller:
        """Return who calls, as :meth:`authorize` does; an unknown caller waits for a look at the files.

        They may have changed. Raises :class:`Rejected`.
        """
        caller = self.caller(credentials, needed)
        shows_something = credentials.authorization or credentials.names
        if caller is None and shows_something and self._unknown < _MOST_UNKNOWN:
            self._unknown += 1
            try:
                looked = self._watcher.look()
                if self._looked is None or self._looked[0] is not looked:
                    self._looked = looked, asyncio.wrap_future(looked)
                await asyncio.wait([self._looked[1]], timeout=_LOOK_SECONDS)
            finally:
                self._unknown -= 1
            caller = self.caller(credentials, needed)
        return self._require(caller, credentials, rpc, needed)

    def authorize(self, credentials: Credentials, rpc: str, needed: Role) -> Caller:
        """Return who calls, by the files as they were at the last look.

        Raises :class:`Rejected`: ``UNAUTHENTICATED`` without a known token, and ``PERMISSION_DENIED`` if no line names
        the certificate or the role is too low.
        """
        return self._require(self.caller(credentials, needed), credentials, rpc, needed)

    def caller(self, credentials: Credentials, needed: Role) -> Caller | None:
        """Return who calls, ``None`` if that is not known. A shard is one for calls that ``needed`` a reader."""
        if self._tokens is None and self._roles is None:
            return ANONYMOUS_ADMIN
        if credentials.is_local and needed is Role.READER:
            return Caller(Role.READER, is_shard=True)
        if credentials.authorization and self._tokens is not None:
            kind, _, token = credentials.authorization.partition(" ")
            if kind == _SHARD and needed is Role.READER and self._is_shard(token):
                return Caller(Role.READER, is_shard=True)
            return self._tokens.content.get(_digest(token.strip())) if kind.lower() == "bearer" else None
        return None if self._roles is None else self._roles.content.caller(credentials.names)

    def _require(self, caller: Caller | None, credentials: Credentials, rpc: str, needed: Role) -> Caller:
        if caller is None:
            if self._roles is not None and not credentials.authorization:
                raise unnamed(credentials.names, rpc, takes_tokens=self._tokens is not None)
            why = "its token is not known" if credentials.authorization else "no token came with it"
            raise Rejected(ErrorCode.UNAUTHENTICATED, f"{rpc} is for callers with a token, and {why}")
        if caller.role < needed:
            proof = f"the certificate of {caller.certificate}" if caller.certificate else "the token"
            why = f"{rpc} needs the role {needed.name.lower()}, {proof} has less"
            raise Rejected(ErrorCode.PERMISSION_DENIED, why)
        return caller


def _shard_proof(key: bytes) -> str:
    return hmac.new(key, b"sparseps shard", hashlib.sha256).hexdigest()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _name_of(digest: bytes) -> str:
    return f"{_HASHED}{digest.hex()[:_SHOWN_DIGITS]}"


def read_tokens(path: Path) -> dict[bytes, Caller]:
    """Return callers by the SHA-256 of their tokens; the message of a :class:`SecurityError` shows no token."""
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
            digest = _digest(token)
        if digest in callers:
            raise SecurityError(f"{path}, line {number}: this token stands in another line too")
        callers[digest] = Caller(role, words[2] if len(words) == 3 else "", _name_of(digest))
    if not callers:
        raise SecurityError(f"{path} holds no token, so no token could be shown; leave --tokens out to ask for none")
    return callers

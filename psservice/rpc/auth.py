"""Who may call what: bearer tokens with roles.

A token belongs to a role, and perhaps to one worker. Memory has only hashes of tokens, and logs have nothing of them.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from pscore.net.channels import warn_of_readers
from pscore.wire.errors import ErrorCode, Rejected
from psservice.rpc.file_watcher import FileWatcher
from psservice.rpc.watched_files import SecurityError, WatchedFiles

_MOST_UNKNOWN = 256  # calls with an unknown token that wait for a look at the file
_LOOK_SECONDS = 2.0  # after which an unknown token is refused if the file cannot be read

_HASHED = "sha256:"
_SHOWN_DIGITS = 8
_SHARD = "Shard"  # the scheme of what shards show one another


class Role(IntEnum):
    """What a caller may do; each role includes those before."""

    READER = 1
    WORKER = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls; ``worker`` is the only worker that the caller may be, empty for any.

    ``token`` names the token in the log, by the beginning of its hash: nobody can find the token by that. ``is_shard``
    tells whether another shard calls, by its proof.
    """

    role: Role
    worker: str = ""
    token: str = ""
    is_shard: bool = False

    def require_worker(self, worker_id: str) -> None:
        """Check that the caller may be this worker; raises :class:`Rejected` (``PERMISSION_DENIED``)."""
        if self.worker and self.worker != worker_id:
            raise Rejected(ErrorCode.PERMISSION_DENIED, f"the token is that of another worker than {worker_id!r}")


ANONYMOUS_ADMIN = Caller(Role.ADMIN)
"""Every caller of a server without tokens."""


class Authenticator:
    """Admits callers by the tokens of a file, or everybody if there is no file.

    A line is ``ROLE TOKEN [WORKER]``; ``#`` begins a comment. ``sha256:`` and the hexadecimal hash of a token may stand
    for the token. ``watcher`` reads the file again when it changes; no other thread does. Raises
    :class:`SecurityError` if the file cannot be read.
    """

    def __init__(self, path: Path | None, watcher: FileWatcher) -> None:
        self._watcher, self._unknown = watcher, 0
        self._looked: tuple[Future[None], asyncio.Future[None]] | None = None  # the last look, as the event loop has it
        self._file = None
        if path is not None:
            warn_of_readers(path)
            self._file = WatchedFiles("tokens", (path,), lambda: read_tokens(path))
            watcher.watch(self._file.refresh)

    def shard_token(self) -> str:
        """Return the proof that a shard shows to another one with the same tokens; empty without tokens.

        It is made of an admin's token, which shards have and workers have not, and serves readers' calls.
        """
        keys = self._shard_keys()
        return f"{_SHARD} {_shard_proof(keys[0])}" if keys else ""

    def _is_shard(self, proof: str) -> bool:
        shown = proof if proof.isascii() else ""
        return any(hmac.compare_digest(_shard_proof(key), shown) for key in self._shard_keys())

    def _shard_keys(self) -> list[bytes]:
        if self._file is None:
            return []
        return sorted(digest for digest, caller in self._file.content.items() if caller.role is Role.ADMIN)

    async def admit(self, metadata: Iterable[tuple[str, str | bytes]], rpc: str, needed: Role) -> Caller:
        """Return who calls, as :meth:`authorize` does; an unknown token waits for a look at the file, which may be new.

        Raises :class:`Rejected`.
        """
        try:
            return self.authorize(metadata, rpc, needed)
        except Rejected as refusal:
            if refusal.reason is not ErrorCode.UNAUTHENTICATED or not _shown(metadata):
                raise
            if self._unknown >= _MOST_UNKNOWN:
                raise
        self._unknown += 1
        try:
            looked = self._watcher.look()
            if self._looked is None or self._looked[0] is not looked:
                self._looked = looked, asyncio.wrap_future(looked)
            await asyncio.wait([self._looked[1]], timeout=_LOOK_SECONDS)
        finally:
            self._unknown -= 1
        return self.authorize(metadata, rpc, needed)

    def authorize(self, metadata: Iterable[tuple[str, str | bytes]], rpc: str, needed: Role) -> Caller:
        """Return who calls, by a call's headers and the tokens of the last look at the file.

        Raises :class:`Rejected`: ``UNAUTHENTICATED``, or ``PERMISSION_DENIED`` if the token's role is too low.
        """
        if self._file is None:
            return ANONYMOUS_ADMIN
        shown = _shown(metadata)
        kind, _, token = shown.partition(" ")
        if kind == _SHARD and needed is Role.READER and self._is_shard(token):
            return Caller(Role.READER, is_shard=True)
        caller = self._file.content.get(_digest(token.strip())) if kind.lower() == "bearer" else None
        if caller is None:
            why = "its token is not known" if shown else "no token came with it"
            raise Rejected(ErrorCode.UNAUTHENTICATED, f"{rpc} is for callers with a token, and {why}")
        if caller.role < needed:
            raise Rejected(
                ErrorCode.PERMISSION_DENIED, f"{rpc} needs the role {needed.name.lower()}, the token has less"
            )
        return caller


def _shard_proof(key: bytes) -> str:
    return hmac.new(key, b"sparseps shard", hashlib.sha256).hexdigest()


def _shown(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    return next((str(value) for key, value in metadata if key.lower() == "authorization"), "")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


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
        name = f"{_HASHED}{digest.hex()[:_SHOWN_DIGITS]}"
        callers[digest] = Caller(role, words[2] if len(words) == 3 else "", name)
    if not callers:
        raise SecurityError(f"{path} holds no token, so nobody could call; leave --tokens out to let everybody in")
    return callers

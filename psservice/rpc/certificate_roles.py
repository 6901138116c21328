"""The roles of certificates: which names in a caller's certificate give which role."""

import re
from pathlib import Path

from pscore.wire.errors import ErrorCode, Rejected
from psservice.rpc.caller import Caller, Role
from psservice.rpc.certificate_names import CertificateNames
from psservice.rpc.watched_files import SecurityError

_SHARD = "shard"
_ROLES = {role.name.lower(): role for role in Role} | {_SHARD: Role.READER}
_LONGEST_NAME = 2048  # of a SPIFFE id
_MOST_FOUND = 256  # certificates whose callers are remembered
_MOST_SHOWN, _LONGEST_SHOWN = 4, 100  # names in a refusal

_DNS_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_LABEL = re.compile(r"[a-z0-9_-]+")
_URI = re.compile(r"[a-z][a-z0-9+.-]*://[!-)+-~]+(/\*)?")  # printable, and a star as the last segment alone
_SEGMENT = re.compile(r"[A-Za-z0-9._-]+")


class CertificateRoles:
    """The callers that a file names. ``lines`` has the number of its line and the caller, by the line's name.

    For one thread, since it remembers who was found last.
    """

    def __init__(self, lines: dict[str, tuple[int, Caller]]) -> None:
        self._lines = lines
        self._found: dict[CertificateNames, Caller | None] = {}

    @property
    def callers(self) -> list[Caller]:
        """The callers that have a line."""
        return [caller for _, caller in self._lines.values()]

    def caller(self, names: CertificateNames) -> Caller | None:
        """Return the caller by the first line of the file that names one of these; ``None`` if no line does."""
        if names not in self._found:
            if len(self._found) >= _MOST_FOUND:
                self._found.clear()
            self._found[names] = self._find(names)
        return self._found[names]

    def _find(self, names: CertificateNames) -> Caller | None:
        found = [
            (*self._lines[written], name)
            for name, forms in _forms_of(names)
            for written in forms
            if written in self._lines
        ]
        if not found:
            return None
        _, caller, name = min(found, key=lambda each: each[0])
        return Caller(caller.role, caller.worker, certificate=name, is_shard=caller.is_shard)


def _forms_of(names: CertificateNames) -> list[tuple[str, tuple[str, ...]]]:
    """Return each name, with the forms in which a line may have it: exactly, and with a star for one part of it."""
    forms: list[tuple[str, tuple[str, ...]]] = []
    for name in names.dns:
        label, _, domain = name.partition(".")
        if "://" not in name and not name.startswith("*"):  # a name that stands for many is nobody's
            forms.append((name, (name, f"*.{domain}") if domain and _LABEL.fullmatch(label) else (name,)))
    for uri in names.uris:
        before, _, segment = uri.rpartition("/")
        if "://" in uri and segment != "*":
            forms.append((uri, (uri, f"{before}/*") if _SEGMENT.fullmatch(segment) else (uri,)))
    return forms


def unnamed(names: CertificateNames, rpc: str, *, takes_tokens: bool) -> Rejected:
    """Return the refusal of a caller whose certificate no line names; ``takes_tokens``: whether a token would do."""
    shown = [name if len(name) <= _LONGEST_SHOWN else f"{name[:_LONGEST_SHOWN]}…" for name in names.dns + names.uris]
    if shown:
        more = f" and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
        why = f"no line names this one ({', '.join(shown[:_MOST_SHOWN])}{more}): add ROLE {shown[0]} at every shard"
    else:
        why = f"no line can name this one: {names.fault}; issue it with a DNS name or a URI"
    what = f"{rpc} is for certificates that the server's --certificate-roles file names, and {why}"
    return Rejected(ErrorCode.PERMISSION_DENIED, f"{what}, or show a token" if takes_tokens else what)


def read_certificate_roles(path: Path) -> CertificateRoles:
    """Read a file of ``ROLE NAME [WORKER]`` lines; raises :class:`SecurityError`."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SecurityError(f"cannot read the file of certificates' roles {path}: {error}") from error
    found: dict[str, tuple[int, Caller]] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        place = f"{path}, line {number}"
        if len(words) not in (2, 3) or words[0].lower() not in _ROLES:
            raise SecurityError(f"{place}: not `ROLE NAME [WORKER]` with a role of {', '.join(_ROLES)}")
        role, name, worker = words[0].lower(), words[1], "".join(words[2:])
        is_uri = "://" in name
        name = name if is_uri else name.lower()
        if len(name) > _LONGEST_NAME or not (_URI if is_uri else _DNS_NAME).fullmatch(name):
            raise SecurityError(
                f"{place}: {name[:_LONGEST_SHOWN]!r} is no DNS name and no URI; a star stands for the first label of a "
                "DNS name (*.workers.example.org) or for the last segment of a URI (spiffe://example.org/workers/*)"
            )
        if worker and role == _SHARD:
            raise SecurityError(f"{place}: a shard is no worker; leave out {worker}")
        if name in found:
            raise SecurityError(f"{place}: {name} stands in line {found[name][0]} too")
        found[name] = number, Caller(_ROLES[role], worker, is_shard=role == _SHARD)
    if not found:
        raise SecurityError(f"{path} names no certificate, so no certificate would have a role; name one")
    return CertificateRoles(found)

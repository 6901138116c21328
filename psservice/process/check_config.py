"""``psservice serve --check-config``: what a start would find, told without one. Nothing is written or served."""

import fcntl
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pscore.model import modelfile
from pscore.net.channels import stamp_of
from pscore.units import human_bytes
from psservice.process.server import StartError, device_of, require_coordinator
from psservice.rpc.auth import read_tokens
from psservice.rpc.caller import Caller
from psservice.rpc.certificate_roles import read_certificate_roles
from psservice.rpc.certificates import SOON_SECONDS, ServerCertificates
from psservice.rpc.ports import hold_port
from psservice.rpc.watched_files import SecurityError
from psservice.settings import ServerSettings, shown, split_address
from psservice.storage import snapshots
from psservice.storage.datadir import require_same_number
from psservice.storage.files import DISK, StorageError
from psservice.storage.lock_file import LOCK_NAME


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check has found: ``fault`` if a server would not start, or could not be reached, with that."""

    subject: str
    text: str
    is_fault: bool = False

    def __str__(self) -> str:
        return f"{'fault' if self.is_fault else 'ok':5}  {self.subject:17}  {self.text}"


class _Fault(Exception):  # noqa: N818 - a finding, and no error of this program
    """A check has found what keeps a server from its start."""


def check(settings: ServerSettings) -> Iterator[Finding]:
    """Check what settings name: ports, certificates, tokens, roles, directories, files, device."""
    yield Finding("settings", ", ".join(f"{name}={value}" for name, value in shown(settings).items()) or "the defaults")
    for subject, look in _CHECKS.items():
        try:
            for text in look(settings):
                yield Finding(subject, text)
        except (_Fault, StartError, SecurityError, StorageError, modelfile.ModelFileError) as error:
            yield Finding(subject, str(error), is_fault=True)
        except OSError as error:
            yield Finding(subject, f"{error.filename}: {error.strerror}", is_fault=True)


def _ports(settings: ServerSettings) -> Iterator[str]:
    with ExitStack() as held:  # all at once, so that two settings with one port are told
        for name, count in (("listen", settings.shards), ("metrics_listen", settings.shards), ("health_listen", 1)):
            address = getattr(settings, name)
            if not address:
                yield f"{settings.explicit(name)} is off"
                continue
            host, first = split_address(address)
            for port in range(first, first + count) if first else ():
                try:
                    held.enter_context(hold_port(host, port))
                except OSError as error:
                    raise _Fault(
                        f"{settings.explicit(name)}: {host}:{port} cannot be bound: {error.strerror}"
                    ) from None
            which = f"{address} to port {first + count - 1}" if first and count > 1 else address
            yield f"{settings.explicit(name)} {which}{'' if first else ' (any free port)'} is free"


def _place(settings: ServerSettings) -> Iterator[str]:
    require_coordinator(settings)
    if settings.shards > 1:
        yield f"{settings.shards} shards, a process each, on this host"
    else:
        yield f"shard {settings.shard_index} of {settings.num_shards}"


def _certificates(settings: ServerSettings) -> Iterator[str]:
    if settings.tls_cert is None or settings.tls_key is None:
        yield "none: plaintext"
        return
    ends = ServerCertificates(settings.tls_cert, settings.tls_key, settings.tls_client_ca).ends
    for name, end in ends.items():
        day = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(end))
        left = end - time.time()
        if left <= 0:
            raise _Fault(f"{settings.explicit(name)} {getattr(settings, name)} has expired at {day}")
        soon = ", soon" if left <= SOON_SECONDS else ""
        yield f"{settings.explicit(name)} {getattr(settings, name)} is valid until {day}{soon}"
    for name in ("coordinator_ca", "source_ca", "source_cert", "source_key", "source_token_file"):
        if (path := getattr(settings, name)) is not None:
            path.read_bytes()
            yield f"{settings.explicit(name)} {path} can be read"


def _callers(settings: ServerSettings) -> Iterator[str]:
    if settings.tokens is not None:
        yield f"--tokens {settings.tokens} has {_counted(list(read_tokens(settings.tokens).values()))}"
    if settings.certificate_roles is not None:
        callers = read_certificate_roles(settings.certificate_roles).callers
        yield f"--certificate-roles {settings.certificate_roles} has {_counted(callers)}"
    if settings.tokens is None and settings.certificate_roles is None:
        everybody = "everybody with a certificate" if settings.tls_client_ca else "everybody who can connect"
        yield f"{everybody} is an administrator"


def _counted(callers: list[Caller]) -> str:
    counts = Counter("shard" if caller.is_shard else caller.role.name.lower() for caller in callers)
    return ", ".join(f"{count} of role {role}" for role, count in sorted(counts.items()))


def _device(settings: ServerSettings) -> Iterator[str]:
    yield str(device_of(settings))


def _data(settings: ServerSettings) -> Iterator[str]:
    if settings.data_dir is None:
        yield "none: a server that ends takes the model along"
        return
    count = settings.shards if settings.shards > 1 else settings.num_shards
    indices = range(count) if settings.shards > 1 else [settings.shard_index]
    for index in indices:
        folder = settings.data_dir / f"shard-{index}-of-{count}"
        _require_writable(folder, "--data-dir")
        _require_unlocked(folder)
        kept = snapshots.readable(DISK, folder / "snapshots")
        if kept:
            manifest = kept[-1].manifest
            yield f"{folder}: continues run {manifest.run_id}, from version {manifest.version} and the journal"
        elif settings.init is not None:
            yield f"{folder}: begins from --init {settings.init}"
        else:
            require_same_number(DISK, settings.data_dir, str(count))
            yield f"{folder}: begins empty, a worker brings the model"
    disk = os.statvfs(_nearest(settings.data_dir))
    yield f"{human_bytes(disk.f_bavail * disk.f_frsize)} are free there"


def _files(settings: ServerSettings) -> Iterator[str]:
    if settings.init is not None:
        if not settings.init.is_dir():
            modelfile.read_metadata(settings.init)
        yield f"--init {settings.init} can be read"
    if settings.final_model is not None:
        modelfile.check_path(settings.final_model)
        _require_writable(settings.final_model.parent, "--final-model")
        yield f"--final-model {settings.final_model} can be written"
    if settings.audit_log is not None and str(settings.audit_log) != "-":
        if not settings.audit_log.parent.is_dir():
            raise _Fault(f"--audit-log {settings.audit_log}: there is no folder {settings.audit_log.parent}")
        _require_writable(settings.audit_log, "--audit-log")
        yield f"--audit-log {settings.audit_log} can be written"


def _nearest(path: Path) -> Path:
    """Return a path, or what there is of the folders above it."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def _require_writable(path: Path, flag: str) -> None:
    there = _nearest(path)
    if not there.is_dir() and there != path.absolute():
        raise _Fault(f"{flag} {path}: {there} is no folder")
    if not os.access(there, os.W_OK):
        raise _Fault(f"{flag} {path}: this user cannot write to {there}")


def _require_unlocked(folder: Path) -> None:
    """Require that no server has a folder; the lock is let go at once."""
    if stamp_of(folder / LOCK_NAME) == (0, 0, 0):
        return
    with (folder / LOCK_NAME).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _Fault(f"{folder} is in use by another server") from None


_CHECKS: dict[str, Callable[[ServerSettings], Iterator[str]]] = {
    "ports": _ports,
    "shards": _place,
    "certificates": _certificates,
    "callers": _callers,
    "device": _device,
    "data": _data,
    "files": _files,
}

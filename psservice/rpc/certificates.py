"""The server's certificates: files that may change, and whose end is told of before it comes."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from pscore.net.channels import warn_of_readers
from psservice.rpc.watched_files import SecurityError, WatchedFiles

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

log = logging.getLogger(__name__)

SOON_SECONDS = 14 * 86400.0
"""Before a certificate's end, from when on the log warns of it; the alert rule has the same."""

_REMIND_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class _Content:
    """What the files hold: gRPC's form, and the end of each certificate, Unix seconds, by the setting that names it."""

    configuration: grpc.ServerCertificateConfiguration
    ends: dict[str, float]


class ServerCertificates:
    """The credentials of a port from PEM files, which :meth:`check` reads again when one changes.

    With ``client_ca``, a caller needs a certificate of that CA (mutual TLS). ``clock`` returns Unix seconds. Raises
    :class:`SecurityError` if a file cannot be read, or certificate and key do not belong together.

    Attributes:
        credentials: for one port.
        handshakes: TLS handshakes that have begun. gRPC does not tell which of them fail.
    """

    def __init__(
        self, cert: Path, key: Path, client_ca: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        warn_of_readers(key)
        self._paths = {"tls_cert": cert, "tls_key": key} | ({"tls_client_ca": client_ca} if client_ca else {})
        self._clock = clock
        self._files = WatchedFiles("certificates", tuple(self._paths.values()), self._read)
        self._given = self._files.content
        self._reminded: dict[str, tuple[float, float]] = {}  # of each certificate: its end, and when the log told of it
        self.handshakes = 0
        self.credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            self._given.configuration,
            self._begin_handshake,  # type: ignore[arg-type]
            client_ca is not None,
        )

    @property
    def ends(self) -> dict[str, float]:
        """The end of each certificate in use, Unix seconds, by its setting: of a chain, its first end."""
        return self._files.content.ends

    def check(self) -> None:
        """Read changed files, and tell the log of certificates that have ended or will soon, once a day."""
        self._files.refresh()
        now = self._clock()
        for name, end in self.ends.items():
            known_end, told = self._reminded.get(name, (0.0, 0.0))
            has_ended = end <= now
            is_news = known_end != end or now - told >= _REMIND_SECONDS or told < end <= now
            if end - now > SOON_SECONDS or not is_news:
                continue
            self._reminded[name] = end, now
            what = "a certificate has expired: handshakes fail" if has_ended else "a certificate expires soon"
            day = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(end))
            level = logging.ERROR if has_ended else logging.WARNING
            log.log(level, what, extra={"file": str(self._paths[name]), "end": day, "setting": name})

    def _begin_handshake(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the certificates if they are others than at the handshake before. In a thread of gRPC's."""
        self.handshakes += 1
        content = self._files.content
        if content is self._given:
            return None
        self._given = content
        return content.configuration

    def _read(self) -> _Content:
        from cryptography import x509  # late: a server without TLS needs none of this
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        data = {name: _read_pem(path) for name, path in self._paths.items()}
        cert, key = self._paths["tls_cert"], self._paths["tls_key"]
        chains: dict[str, list[Certificate]] = {}
        for name in data.keys() - {"tls_key"}:
            try:
                chains[name] = x509.load_pem_x509_certificates(data[name])
            except ValueError as error:
                raise SecurityError(f"{self._paths[name]} holds no certificate in PEM form") from error
        try:
            public = load_pem_private_key(data["tls_key"], None).public_key()
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise SecurityError(f"{key} holds no key in PEM form without a password") from error
        if public != chains["tls_cert"][0].public_key():
            raise SecurityError(f"{cert} and {key} do not belong together: the key is another certificate's")
        ends = {name: min(each.not_valid_after_utc.timestamp() for each in chain) for name, chain in chains.items()}
        configuration = grpc.ssl_server_certificate_configuration(
            [(data["tls_key"], data["tls_cert"])], data.get("tls_client_ca")
        )
        return _Content(configuration, dict(sorted(ends.items())))


def _read_pem(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SecurityError(f"cannot read {path}: {error.strerror}") from error
    if b"-----BEGIN " not in data:
        raise SecurityError(f"{path} is not a PEM file")
    return data

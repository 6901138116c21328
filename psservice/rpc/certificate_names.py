"""The names in a caller's certificate: the DNS names and URIs of its subject alternative name."""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MOST_NAMES = 64
"""Of a certificate; further ones are not looked at."""

LARGEST_PEM_BYTES = 16 << 10
"""Of a certificate; the names of a larger one are not looked at."""

_MOST_KNOWN = 1024  # certificates whose names are remembered


@dataclass(frozen=True, slots=True)
class CertificateNames:
    """DNS names in small letters, and URIs as they are; ``fault`` says why there are none."""

    dns: tuple[str, ...] = ()
    uris: tuple[str, ...] = ()
    fault: str = ""

    def __bool__(self) -> bool:
        return bool(self.dns or self.uris)


NO_CERTIFICATE = CertificateNames(fault="no certificate came with the connection")


class NamesOfCertificates:
    """Reads the certificates of connections, and remembers the names of the last ones. For one thread.

    gRPC's own ``peer_dns`` ends a name at its first zero byte. So the certificate is read here, which takes 50 µs, and
    2 ms for the largest; an open stream reads it once.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, CertificateNames] = OrderedDict()

    def of(self, context: Any) -> CertificateNames:
        """Return the names of a call's caller. TLS has checked that its certificate descends from the CA."""
        (pem,) = context.auth_context().get("x509_pem_cert") or (b"",)
        if not pem:
            return NO_CERTIFICATE
        if len(pem) > LARGEST_PEM_BYTES:
            return CertificateNames(fault=f"it has more than {LARGEST_PEM_BYTES >> 10} KiB")
        digest = hashlib.sha256(pem).digest()
        names = self._known.get(digest)
        if names is None:
            names = self._known[digest] = read_names(pem)
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return names


def read_names(pem: bytes) -> CertificateNames:
    """Return the names of a certificate in PEM form; a name with a character that no name has is left out."""
    from cryptography import x509  # late: a server without TLS needs none of this

    try:
        extensions = x509.load_pem_x509_certificate(pem).extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return CertificateNames(fault="it has no subject alternative name")
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        return CertificateNames(fault=f"it cannot be read ({type(error).__name__})")
    dns, uris = [], []
    for _, name in zip(range(MOST_NAMES), names, strict=False):
        if not isinstance(name, x509.DNSName | x509.UniformResourceIdentifier):
            continue
        if not name.value.isascii() or not name.value.isprintable() or " " in name.value:
            continue
        if isinstance(name, x509.DNSName):
            dns.append(name.value.lower())
        else:
            uris.append(name.value)
    found = CertificateNames(tuple(dns), tuple(uris))
    return found or CertificateNames(fault="its subject alternative name has no DNS name and no URI that can be read")

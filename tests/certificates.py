"""Certificates with any subject alternative names, of an authority of the tests; also such as no authority issues."""

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import NameOID


def dns(name):
    """A DNS name with any bytes of ASCII."""
    return x509.DNSName._init_without_validation(name)


def ip(address):
    return x509.IPAddress(ipaddress.ip_address(address))


def uri(name):
    return x509.UniformResourceIdentifier._init_without_validation(name)


def pem_of(authority, *names, common_name="", extensions=()):
    """The certificate and its key, in PEM form, with these names and further extensions."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.load_pem_x509_certificate(authority.cert_pem.bytes())
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)] if common_name else []))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=100))
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    signed = builder.sign(load_pem_private_key(authority.private_key_pem.bytes(), None), hashes.SHA256())
    return signed.public_bytes(Encoding.PEM), key.private_bytes(
        Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()
    )


def write(authority, directory, name, *names, **options):
    """Write ``NAME.pem``, ``NAME.key`` and ``ca.pem``; return them as settings of a caller."""
    directory.mkdir(exist_ok=True)
    certificate, key = pem_of(authority, *names, **options)
    for suffix, data in ((".pem", certificate), (".key", key)):
        path = directory / f"{name}{suffix}"
        path.write_bytes(data)
        path.chmod(0o600)
    authority.cert_pem.write_to_path(directory / "ca.pem")
    return {
        "tls_ca": directory / "ca.pem",
        "tls_cert": directory / f"{name}.pem",
        "tls_key": directory / f"{name}.key",
    }

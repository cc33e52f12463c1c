"""A development CA, and a certificate for each service.

A production deployment uses its own CA. The certificates made here are an example of the required form.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

OWNERS = ("target", "draft", "orchestrator", "gateway", "operator")
"""The services, by the names in their certificates. ``operator`` is for administrators and gives no access rights."""

CERT, KEY, CA = "tls.crt", "tls.key", "ca.crt"
"""File names, as in a Kubernetes secret of type kubernetes.io/tls."""

_CA_DAYS = 3650
_LOCAL = ("localhost", "127.0.0.1", "::1")


def make(directory: Path, days: float = 90.0, names: Sequence[str] = (), owners: Iterable[str] = OWNERS) -> None:
    """Make ``directory``/OWNER/{tls.crt, tls.key, ca.crt} for each owner, signed by the CA in ``directory``/ca.

    The CA is made if it does not exist, so a second call renews the certificates. They are valid for ``days`` from now.
    ``names`` are further host names and addresses for all certificates. Raises OSError or ValueError if the CA's files
    cannot be used, and ValueError if one of ``names`` is an owner: every certificate would then have that role.
    """
    if taken := [name for name in names if name.lower().rstrip(".") in OWNERS]:
        raise ValueError(f"{taken[0]} is the name by which that service is known; every certificate would carry it")
    ca_directory = directory / "ca"
    if not (ca_directory / KEY).exists():
        _make_ca(ca_directory)
    ca = x509.load_pem_x509_certificate((ca_directory / CERT).read_bytes())
    ca_key = serialization.load_pem_private_key((ca_directory / KEY).read_bytes(), password=None)
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{ca_directory / KEY} was not made here")
    for owner in owners:
        key = ec.generate_private_key(ec.SECP256R1())
        san = [_general_name(name) for name in (owner, *_LOCAL, *names)]
        cert = (
            _builder(owner, ca.subject, key, days=days)
            .add_extension(x509.SubjectAlternativeName(san), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                # Model services are servers, an operator is a client, and the orchestrator is both.
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
            .sign(ca_key, hashes.SHA256())
        )
        _write(directory / owner, cert, key)
        _replace(directory / owner / CA, ca.public_bytes(serialization.Encoding.PEM))


def _make_ca(directory: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = "specdec development CA"
    cert = (
        _builder(name, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key, days=_CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.KeyUsage(False, False, False, False, False, key_cert_sign=True, crl_sign=True,
                          encipher_only=False, decipher_only=False),
            critical=True,
        )
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    _write(directory, cert, key)


def _builder(
    common_name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, *, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    until = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # The clocks of two machines differ. Tests make expired certificates, which must begin before they end.
        .not_valid_before(min(now, until) - datetime.timedelta(minutes=5))
        .not_valid_after(until)
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(directory: Path, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    _replace(
        directory / KEY,
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        mode=0o600,
    )
    _replace(directory / CERT, cert.public_bytes(serialization.Encoding.PEM))


def _replace(file: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace a file atomically."""
    fresh = file.with_name(file.name + ".new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
        stream.write(data)
    fresh.replace(file)

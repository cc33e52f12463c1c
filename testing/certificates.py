"""Certificates of a development CA as settings, and for those who call."""

from __future__ import annotations

from pathlib import Path

from specdec.security import dev_ca as certificates
from specdec.security.tls import Tls


def files(directory: Path, owner: str) -> dict[str, str]:
    """The settings of a service."""
    return {
        "tls_cert": str(directory / owner / certificates.CERT),
        "tls_key": str(directory / owner / certificates.KEY),
        "tls_ca": str(directory / owner / certificates.CA),
    }


def caller(directory: Path, owner: str) -> Tls:
    own = files(directory, owner)
    return Tls(own["tls_ca"], own["tls_cert"], own["tls_key"])


def stranger(directory: Path) -> Tls:
    """Knows the CA, and has no certificate."""
    return Tls(str(directory / "operator" / certificates.CA))

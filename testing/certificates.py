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
    paths = files(directory, owner)
    return Tls(paths["tls_ca"], paths["tls_cert"], paths["tls_key"])


def stranger(directory: Path) -> Tls:
    """Knows the CA, and has no certificate."""
    return Tls(str(directory / "operator" / certificates.CA))


def refused_targets(ours: Path, theirs: Path) -> dict[str, tuple[Path | None, str]]:
    """By the words in which an orchestrator with certificates of ``ours`` says why it does not use a target: the
    certificates of that target (None: it speaks no TLS), and what it serves as. ``theirs`` is of another CA."""
    return {
        "it does not speak TLS": (None, "target"),
        "not from a CA that tls_ca names": (theirs, "target"),
        "not issued for target": (ours, "draft"),
    }

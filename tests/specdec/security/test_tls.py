"""Certificates in files: checked in words, and read again when they change."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509

from specdec.core.settings import ServiceSettings
from specdec.security import dev_ca as certificates
from specdec.security.tls import Tls, of
from testing.certificates import caller, files


@pytest.fixture(scope="module")
def certificate_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    certificates.make(directory, names=["target.example", "10.1.2.3"])
    return directory


@pytest.fixture
def replaced(certificate_dir: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(certificate_dir, tmp_path / "own"))


def test_certificates_carry_the_services_names(certificate_dir: Path) -> None:
    for owner in certificates.OWNERS:
        cert = x509.load_pem_x509_certificate((certificate_dir / owner / certificates.CERT).read_bytes())
        san = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert san.get_values_for_type(x509.DNSName) == [owner, "localhost", "target.example"]
        assert "10.1.2.3" in map(str, san.get_values_for_type(x509.IPAddress))
        key = certificate_dir / owner / certificates.KEY
        assert key.stat().st_mode & 0o077 == 0, "only its owner reads the key"


def test_a_second_call_renews_the_certificates_and_keeps_the_ca(replaced: Path) -> None:
    before = {file: file.read_bytes() for file in replaced.rglob("*.*")}
    certificates.make(replaced)
    changed = {str(file.relative_to(replaced)) for file, content in before.items() if file.read_bytes() != content}
    assert changed == {f"{owner}/{file}" for owner in certificates.OWNERS for file in ("tls.crt", "tls.key")}


def test_a_service_without_certificates_speaks_in_the_clear(certificate_dir: Path) -> None:
    assert of(ServiceSettings(), "target") is None
    assert of(ServiceSettings(**files(certificate_dir, "target")), "target") is not None


def spoil_key(replaced: Path) -> None:
    (replaced / "target" / "tls.key").write_text("-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n")


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "no certificate": (lambda replaced: (replaced / "target/tls.crt").write_text("x"), "has no certificate in PEM"),
    "no CA": (lambda replaced: (replaced / "target/ca.crt").write_text(""), "ca.crt has no certificate in PEM"),
    "no key": (spoil_key, "is no private key in PEM without a password"),
    "another's key": (
        lambda replaced: shutil.copy(replaced / "draft/tls.key", replaced / "target/tls.key"),
        "is not the key of",
    ),
    "expired": (lambda replaced: certificates.make(replaced, days=-1), "expired at 20"),
    "another service": (
        lambda replaced: shutil.copytree(replaced / "draft", replaced / "target", dirs_exist_ok=True),
        "issued for draft, localhost, target.example (DNS names in its subjectAltName), not for target",
    ),
    "no file": (lambda replaced: (replaced / "target/tls.key").unlink(), "No such file"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_a_bad_file_is_refused_in_words_and_as_a_change_logged_once_while_the_old_one_stays(
    kind: str, replaced: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, words = SPOILT[kind]
    settings = ServiceSettings(**files(replaced, "target"))
    tls = of(settings, "target")
    good = tls.current()
    spoil(replaced)
    with pytest.raises(ValueError, match="target") as refused:
        of(settings, "target")
    caplog.set_level(logging.INFO)
    assert tls.current() is tls.current() is good
    [record] = caplog.records
    for said in (str(refused.value), record.__dict__["reason"]):
        assert words in said
        assert not any(secret in said for secret in ("BEGIN", "c2VjcmV0"))
    certificates.make(replaced)
    shutil.copy(replaced / "ca/tls.crt", replaced / "target/ca.crt")
    assert tls.current() not in (good, None)
    assert tls.version == 1


def test_a_change_is_taken_over_once_it_is_whole(replaced: Path, certificate_dir: Path) -> None:
    tls = caller(replaced, "target")
    good = tls.current()
    shutil.copy(replaced / "target/tls.crt", replaced / "old.crt")
    certificates.make(replaced)
    shutil.copy(replaced / "target/tls.crt", replaced / "new.crt")
    shutil.copy(replaced / "old.crt", replaced / "target/tls.crt")
    assert tls.current() is good, "the key is new, the certificate is not"
    shutil.copy(replaced / "new.crt", replaced / "target/tls.crt")
    assert tls.current().cert == (replaced / "new.crt").read_bytes()
    assert tls.changed_since(0)
    assert not tls.changed_since(1)


def test_a_certificate_needs_its_key_and_neither_is_shown(certificate_dir: Path) -> None:
    with pytest.raises(ValueError, match="go together"):
        Tls(str(certificate_dir / "ca/tls.crt"), str(certificate_dir / "target/tls.crt"))
    tls = caller(certificate_dir, "target")
    assert "BEGIN" not in repr(tls.current()) + repr(tls)

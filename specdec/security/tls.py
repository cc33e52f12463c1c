"""Certificates of one service or caller: files that may be replaced at any time, and gRPC credentials made from them.

Knows files, X.509 and gRPC's credentials; does not know access rights (specdec.transport.rpc, docs/security.md).
"""

from __future__ import annotations

import datetime
import logging
import ssl
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import cast

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from specdec.core.settings import ServiceSettings
from specdec.security.watched_files import Changing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pems:
    """The contents of the files. ``repr`` does not show them."""

    __repr__ = object.__repr__

    ca: bytes
    cert: bytes | None
    key: bytes | None


class Tls:
    """Certificates of this side. Changed files are read again; invalid ones are logged, and the last valid stay in use.

    ``ca`` has one or more trusted certificates. ``cert`` and ``key`` are this side's own; a caller of the public API
    needs none. ``owner`` is a DNS name that the certificate must have, and ``never`` are those that it must not have.
    Raises ValueError with a readable message.
    """

    def __init__(self, ca: str, cert: str = "", key: str = "", owner: str = "", never: Collection[str] = ()) -> None:
        if bool(cert) != bool(key):
            raise ValueError("a certificate and its key go together: one of the two is missing")
        self.files = (ca, cert, key)
        self._owner, self._never = owner, never
        try:
            self._changing = Changing(self.files, self._read)
        except OSError as error:
            raise ValueError(f"{error.filename}: {error.strerror}") from error

    @property
    def version(self) -> int:
        """Increases with every change of the files that took effect."""
        return self._changing.version

    def current(self) -> Pems:
        return self._changing.current()

    def problem(self) -> str:
        """What is wrong with this side's certificate now (it may have expired meanwhile); empty if nothing is."""
        pems = self.current()
        try:
            if pems.cert is not None and pems.key is not None:
                self._check(pems.cert, pems.key)
        except ValueError as error:
            return str(error)
        return ""

    def names(self) -> list[str]:
        """The DNS names of this side's certificate; empty without one."""
        cert = self.current().cert
        return _dns_names(_certificates(self.files[1], cert)[0]) if cert is not None else []

    def changed_since(self, version: int) -> bool:
        self.current()
        return self.version != version

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials for a new channel, which keeps the present contents of the files for its whole life."""
        pems = self.current()
        return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)

    def server_credentials(self, ask_callers: bool) -> grpc.ServerCredentials:
        """Credentials that read the current files at every handshake. ``ask_callers``: callers need a certificate."""

        def configuration() -> grpc.ServerCertificateConfiguration:
            pems = self.current()
            assert pems.key is not None, "a server has a certificate"
            assert pems.cert is not None, "a server has a certificate"
            return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca if ask_callers else None)

        used = self.version

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal used
            if not self.changed_since(used):
                return None
            used = self.version
            return configuration()

        # The type stubs lack None, which means no change.
        fetch = cast(Callable[[], grpc.ServerCertificateConfiguration], changed)
        return grpc.dynamic_ssl_server_credentials(configuration(), fetch, require_client_authentication=ask_callers)

    def https_context(self) -> ssl.SSLContext:
        """A server's context without gRPC, which reads the current files at every handshake, too."""
        context, used = self._context(), self.version

        def changed(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
            nonlocal context, used
            if self.changed_since(used):
                try:
                    context, used = self._context(), self.version
                except OSError as error:  # the files are just being replaced: at the next handshake
                    log.warning("the new certificate cannot be used yet", extra={"reason": str(error)})
            connection.context = context

        first = context
        first.sni_callback = changed
        return first

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(*self.files[1:])
        return context

    def _read(self) -> Pems:
        ca, cert, key = (_bytes(file) for file in self.files)
        assert ca is not None, "a caller without a CA has no Tls"
        _certificates(self.files[0], ca)
        if cert is not None and key is not None:
            self._check(cert, key)
        return Pems(ca, cert, key)

    def _check(self, cert: bytes, key: bytes) -> None:
        _, cert_file, key_file = self.files
        certificate = _certificates(cert_file, cert)[0]
        try:
            private = load_pem_private_key(key, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):  # the library's message may quote the key
            raise ValueError(f"{key_file} is no private key in PEM without a password") from None
        if private.public_key() != certificate.public_key():
            raise ValueError(f"{key_file} is not the key of {cert_file}")
        now = datetime.datetime.now(datetime.UTC)
        if now > certificate.not_valid_after_utc:
            raise ValueError(f"{cert_file} expired at {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
        if now < certificate.not_valid_before_utc:
            raise ValueError(f"{cert_file} is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC")
        names = _dns_names(certificate)
        if foreign := [name for name in self._never if name in names]:
            raise ValueError(f"{cert_file} is issued for {foreign[0]}, which is another service")
        if self._owner and self._owner not in names:
            raise ValueError(
                f"{cert_file} is issued for {', '.join(names) or 'no name'} (DNS names in its subjectAltName),"
                f" not for {self._owner}"
            )


def of(settings: ServiceSettings, owner: str = "", never: Collection[str] = ()) -> Tls | None:
    """The certificates in a service's settings, with names as of ``Tls``; None for no TLS. Raises ValueError with a
    readable message."""
    if not settings.tls_ca:
        return None
    return Tls(settings.tls_ca, settings.tls_cert, settings.tls_key, owner=owner, never=never)


def _bytes(file: str) -> bytes | None:
    if not file:
        return None
    with open(file, "rb") as stream:
        return stream.read()


def _certificates(file: str, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise ValueError(f"{file} has no certificate in PEM") from None


def _dns_names(certificate: x509.Certificate) -> list[str]:
    try:
        san = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return san.get_values_for_type(x509.DNSName)

"""The reason why a TLS connection fails, as a readable message. gRPC's errors do not tell what the other side refused.

Repeats the handshake with the standard library and translates its error.
"""

from __future__ import annotations

import asyncio
import ssl

from specdec.security.tls import Tls

_TIMEOUT_S = 1.0
_HOSTNAME_MISMATCH = 62
_UNKNOWN_CA = "its certificate is not from a CA that tls_ca names"
_CERTIFICATE_PROBLEMS = {
    7: _UNKNOWN_CA,  # the issuer has the name of a known CA but another key
    9: "its certificate is not valid yet",
    10: "its certificate has expired",
    18: _UNKNOWN_CA,
    19: _UNKNOWN_CA,
    20: _UNKNOWN_CA,
}
"""By OpenSSL error number, X509_V_ERR_*."""


async def tls_problem(address: str, tls: Tls | None, name: str = "") -> str:
    """Why a caller with ``tls`` cannot connect to ``host:port``; empty if the cause is not TLS, or is unknown.

    The server's certificate must have the DNS name ``name``, or the host if that is empty.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(
                host, int(port), ssl=_context(tls), server_hostname=name or host
            )
            try:
                # TLS 1.3 refuses a caller's certificate only after the handshake, and an HTTP/2 server sends first.
                refused = not await reader.read(1)
            except ConnectionError:
                refused = True
            finally:
                writer.transport.abort()
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _HOSTNAME_MISMATCH:
            return f"its certificate is not issued for {name or host}"
        return _CERTIFICATE_PROBLEMS.get(error.verify_code, f"its certificate is invalid: {error.verify_message}")
    except ssl.SSLError as error:
        if tls is None:
            return ""  # both sides use no TLS
        silent = error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
        return "it does not speak TLS" if silent else f"TLS failed: {error.reason}"
    except (OSError, ValueError):  # no listener, a timeout, or an address of another form
        return ""
    if tls is None:
        return "it speaks TLS, and this side has no certificates (tls_ca)"
    if refused and not tls.files[1]:
        return "it wants a certificate of its callers, and this side has none (tls_cert, tls_key)"
    if refused:
        return f"it does not accept this side's certificate: {tls.problem() or 'it trusts another CA'}"
    return ""


def _context(tls: Tls | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if tls is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    _, cert, key = tls.files
    context.load_verify_locations(cadata=tls.current().ca.decode())
    if cert:
        context.load_cert_chain(cert, key)
    return context

"""Why a TLS connection does not come about, in words: gRPC's own say nothing of what the other side refused.

Tries the handshake once more with the standard library and translates; refuses to know what the connection was for.
"""

from __future__ import annotations

import asyncio
import ssl

from specdec.security.tls import Tls

_TIMEOUT_S = 1.0
_HOSTNAME_MISMATCH = 62
_STRANGER = "its certificate is not from a CA that tls_ca names"
_OF_THEIR_CERTIFICATE = {
    7: _STRANGER,  # it has the name of one, but its key made another signature
    9: "its certificate is not valid yet",
    10: "its certificate has expired",
    18: _STRANGER,
    19: _STRANGER,
    20: _STRANGER,
}
"""By OpenSSL's number, X509_V_ERR_*."""


async def tls_trouble(address: str, tls: Tls | None, name: str = "") -> str:
    """What keeps a caller with ``tls`` from ``host:port``, whose certificate must have ``name`` (else the host).

    Empty if it is not TLS, or if that cannot be told.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(
                host, int(port), ssl=_context(tls), server_hostname=name or host
            )
            try:
                # A caller's certificate is refused after the handshake (TLS 1.3); and an HTTP/2 server speaks first.
                refused = not await reader.read(1)
            except ConnectionError:
                refused = True
            finally:
                writer.transport.abort()
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _HOSTNAME_MISMATCH:
            return f"its certificate is not made out to {name or host}"
        return _OF_THEIR_CERTIFICATE.get(error.verify_code, f"its certificate is no good: {error.verify_message}")
    except ssl.SSLError as error:
        if tls is None:
            return ""  # two that both speak in the clear
        silent = error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
        return "it does not speak TLS" if silent else f"TLS failed: {error.reason}"
    except (OSError, ValueError):  # nobody listens, or not in time; or no address of this kind
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

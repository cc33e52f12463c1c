"""The address for a health probe of the service in this container, from the environment that both share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ipaddress import ip_address

from specdec.security.tls import Tls


def own_health(environment: Mapping[str, str], tls: Callable[[], Tls | None]) -> tuple[str, Tls | None, str]:
    """(address, certificates, server name) for a health probe of the service with this ``environment``.

    SPECDEC_HEALTH_PORT is always without TLS. At SPECDEC_PORT the service presents this side's own certificate, which
    need not be valid for loopback, so the probe expects one of its names. ``tls`` is called only for SPECDEC_PORT.
    Raises ValueError if neither port is set.
    """
    host = _reachable(environment.get("SPECDEC_HOST", "127.0.0.1"))
    if port := environment.get("SPECDEC_HEALTH_PORT"):
        return f"{host}:{port}", None, ""
    if not (port := environment.get("SPECDEC_PORT")):
        raise ValueError("neither an address is given nor SPECDEC_HEALTH_PORT or SPECDEC_PORT set")
    certificates = tls()
    names = [name for name in certificates.names() if "*" not in name] if certificates else []
    return f"{host}:{port}", certificates, names[0] if names else ""


def _reachable(host: str) -> str:
    """An address to connect to, for one to listen on: loopback in place of 0.0.0.0 or ::."""
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return host
    if address.version == 6:
        return "[::1]" if address.is_unspecified else f"[{address}]"
    return "127.0.0.1" if address.is_unspecified else str(address)

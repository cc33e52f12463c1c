"""Where the service of this container tells its health, by the environment that it was started with.

Knows the variables that a probe and its service share; refuses to know what health is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ipaddress import ip_address

from specdec.security.tls import Tls


def own_health(environment: Mapping[str, str], tls: Callable[[], Tls | None]) -> tuple[str, Tls | None, str]:
    """Its address, how it is asked, and the name that its certificate has.

    The health port speaks in the clear whatever the other one speaks. At the other one the certificate is this side's
    own, and its names are not those of loopback. ``tls`` is called for that one alone.
    Raises ValueError, in words, if the environment does not say where.
    """
    host = _reachable(environment.get("SPECDEC_HOST", "127.0.0.1"))
    if port := environment.get("SPECDEC_HEALTH_PORT"):
        return f"{host}:{port}", None, ""
    if not (port := environment.get("SPECDEC_PORT")):
        raise ValueError("neither an address is given nor SPECDEC_HEALTH_PORT or SPECDEC_PORT set")
    own = tls()
    names = [name for name in own.names() if "*" not in name] if own else []
    return f"{host}:{port}", own, names[0] if names else ""


def _reachable(host: str) -> str:
    """Of what one listens on: all addresses are none that one calls."""
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return host
    if address.version == 6:
        return "[::1]" if address.is_unspecified else f"[{address}]"
    return "127.0.0.1" if address.is_unspecified else str(address)

"""Variables of the environment that libraries read by themselves, where that surprises.

Of the environment's proxies our gRPC channels use one that is named for gRPC, and no other. gRPC would also use those
of https_proxy and http_proxy. They are meant for the web and seldom lead to services, and gRPC's errors do not name
them. Nor do the errors of a hub's client name what it reads.
"""

from __future__ import annotations

import os

PROXY = "grpc_proxy"
"""The variable of a proxy that our channels use, except for the hosts in no_grpc_proxy (without it: in no_proxy)."""

WEB_PROXIES = ("https_proxy", "http_proxy")
"""In the order in which gRPC looks for them; it reads no variable in capitals."""

DIRECT = ("grpc.enable_http_proxy", 0)
"""The option of a channel that uses no proxy."""


def proxy_options() -> list[tuple[str, int]]:
    """The options for a channel that is opened now."""
    return [] if os.environ.get(PROXY) else [DIRECT]


_HUB = ("HF_ENDPOINT", "HF_HUB_OFFLINE", "SSL_CERT_FILE", "SSL_CERT_DIR")
_PROXIES = ("all_proxy", *WEB_PROXIES)  # also in capitals


def of_hub() -> str:
    """For the end of an error of a hub's client: which variables decide how it reaches the hub; empty without any."""
    names = [*_HUB, *_PROXIES, *map(str.upper, _PROXIES)]
    present = [name for name in names if os.environ.get(name)]
    return f" (the environment sets {', '.join(present)})" if present else ""

"""Which of the environment's proxies our gRPC channels use: only one that is named for gRPC.

gRPC itself also uses those of https_proxy and http_proxy. They are meant for the web and seldom lead to services, and
an error of gRPC does not name them.
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
    """The options for a channel that is made now."""
    return [] if os.environ.get(PROXY) else [DIRECT]

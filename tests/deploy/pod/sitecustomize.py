"""Stands in for a cluster's name service inside a pod's process: Python imports a module of this name at its start.

The file that POD_HOSTS names has a line for each service: its name, then the addresses of its pods that are ready.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

if hosts := os.environ.get("POD_HOSTS"):
    import uvloop

    _elsewhere = uvloop.Loop.getaddrinfo

    async def _getaddrinfo(self: Any, host: Any, port: Any, **options: Any) -> Any:
        lines = Path(hosts).read_text().splitlines()  # noqa: ASYNC240  short
        services = {name: addresses for name, *addresses in map(str.split, lines)}
        if host not in services:
            return await _elsewhere(self, host, port, **options)
        if not services[host]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        kind = options.get("type", socket.SOCK_STREAM)
        return [(socket.AF_INET, kind, 6, "", (address, port)) for address in services[host]]

    uvloop.Loop.getaddrinfo = _getaddrinfo

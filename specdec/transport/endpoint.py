"""Whether a process listens at an address. Knows sockets; does not know what is served there."""

from __future__ import annotations

import asyncio
import contextlib
import socket

_TIMEOUT_S = 2.0


async def is_refused(address: str) -> bool:
    """Whether no process listens at ``host:port``: an address of the host refuses, and none accepts. False if that
    cannot be learned."""
    host, _, port = address.rpartition(":")
    refused = False
    with contextlib.suppress(OSError, ValueError):  # TimeoutError is an OSError
        async with asyncio.timeout(_TIMEOUT_S):
            loop = asyncio.get_running_loop()
            for *_, resolved in await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM):
                try:
                    _, writer = await asyncio.open_connection(*resolved[:2])
                except ConnectionRefusedError:
                    refused = True
                except OSError:  # such as a host without IPv6
                    continue
                else:
                    writer.close()
                    return False
            return refused
    return False

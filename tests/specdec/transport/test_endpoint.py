"""Whether a process listens, where a name has several addresses."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from specdec.transport.endpoint import is_refused


@pytest.mark.parametrize("others", [[], ["127.0.0.2"], ["::1"]])
async def test_a_name_is_refused_if_no_address_of_it_accepts(
    others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = socket.getaddrinfo

    def found(host: Any, port: Any, *_: Any, **options: Any) -> Any:
        hosts = [*others, "127.0.0.1"] if host == "name" else [host]
        return [each for host in hosts for each in find(host, port, type=socket.SOCK_STREAM)]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert not await is_refused(f"name:{port}")
    server.close()
    await server.wait_closed()
    assert await is_refused(f"name:{port}")


@pytest.mark.parametrize("address", ["", "no-port", "unix:/none", "name.invalid:1"])
async def test_what_cannot_be_reached_is_not_refused(address: str) -> None:
    assert not await is_refused(address)

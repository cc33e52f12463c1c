"""What stands in front of several servers under one address, as a Service of Kubernetes does: it deals out
connections, and what travels in one stays with its server. Knows bytes; refuses to know requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence


class Balancer:
    """``async with`` listens on ``host:port``; ``endpoints()`` is asked at every new connection."""

    def __init__(
        self, endpoints: Callable[[], Sequence[tuple[str, int]]], host: str = "127.0.0.1", port: int = 0, seed: int = 0
    ) -> None:
        self.num_connections = 0
        self.host, self.port = host, port
        self._endpoints = endpoints
        self._random = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    async def __aenter__(self) -> Balancer:
        self._server = await asyncio.start_server(self._accept, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError, IndexError):  # no server there: closed at once
            there, back = await asyncio.open_connection(*self._random.choice(list(self._endpoints())))
            with contextlib.closing(back):
                await asyncio.gather(_pump(reader, back), _pump(there, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()

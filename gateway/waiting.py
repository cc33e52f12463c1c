"""What requests wait for, which ends with their clients and with the server. Does not know what it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from gateway.errors import HttpError, unavailable

T = TypeVar("T")


class Waiting:
    """Of all requests of a server."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()
        self.has_ended = False

    def end(self) -> None:
        self.has_ended = True
        for task in self._tasks:
            task.cancel()

    async def first_of(self, work: asyncio.Future[Any], *others: asyncio.Future[Any], timeout_s: float | None) -> None:
        """Wait until one of them is done, or for so long. ``work`` is cancelled when the server ends."""
        self._tasks.add(work)
        if self.has_ended:
            work.cancel()
        try:
            await asyncio.wait({work, *others}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._tasks.discard(work)

    async def while_connected(self, request: Request, work: Awaitable[T]) -> T:
        """The result of ``work``. Raises ClientDisconnect, and cancels it, as soon as the client is gone; and HttpError
        when the server ends."""
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
        try:
            await self.first_of(working, leaving, timeout_s=None)
            if not working.done():
                raise ClientDisconnect
            if working.cancelled():
                raise shutting_down()
            return working.result()
        finally:
            working.cancel()
            leaving.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)


def shutting_down() -> HttpError:
    """What a request gets that has not ended by then."""
    return unavailable("this server is shutting down")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

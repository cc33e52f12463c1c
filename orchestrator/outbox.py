"""The queue of chunks between a request's samples and its client, which may read slowly.

Knows backpressure; does not know what a chunk contains and what parking does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

BUFFERED_CHUNKS = 32
"""Chunks that a client may lag behind before its samples wait."""


class Outbox:
    """``patience_s``: how long a sample waits for its client before it is parked."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._chunks: asyncio.Queue[Any] = asyncio.Queue(BUFFERED_CHUNKS)
        self._open = asyncio.Event()
        self._open.set()
        self._turn = asyncio.Lock()  # first come, first served
        self._num_waiting = 0

    async def put(self, chunk: Any, park: Callable[[], None]) -> None:
        """Put a chunk as soon as there is room. If that takes longer than the patience, ``park()`` is called first.

        After a sample was parked, no sample puts a chunk until the client has read the whole queue. Otherwise a client
        that reads a chunk now and then would cost a replay each time.
        """
        if not self._num_waiting and self._open.is_set() and not self._chunks.full():
            self._chunks.put_nowait(chunk)
            return
        self._num_waiting += 1
        try:
            await self._wait_and_put(chunk, park)
        finally:
            self._num_waiting -= 1

    async def _wait_and_put(self, chunk: Any, park: Callable[[], None]) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await self._put(chunk)
        except TimeoutError:
            if not self._chunks.empty():
                self._open.clear()
            park()
            await self._put(chunk)

    async def _put(self, chunk: Any) -> None:
        async with self._turn:
            await self._open.wait()
            await self._chunks.put(chunk)

    async def fail(self, error: Exception) -> None:
        """Put the error that ends the request."""
        await self._chunks.put(error)

    async def get(self) -> Any:
        """The next chunk. Raises the error that ended the request."""
        chunk = await self._chunks.get()
        if self._chunks.empty():
            self._open.set()
        if isinstance(chunk, Exception):
            raise chunk
        return chunk

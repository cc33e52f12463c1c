"""Server-sent events over a streaming response. Knows their form; does not know what they say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.errors import encoded
from gateway.waiting import Waiting, shutting_down

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"
_SILENCE = b": keep-alive\n\n"


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + encoded(data) + b"\n\n"


class Streaming(StreamingResponse):
    """The events of ``stream``, which is entered and left with the answer: also if its client is gone before the first
    one. After ``silence_s`` without an event a comment is sent, which keeps connections of proxies open."""

    def __init__(
        self, stream: AbstractAsyncContextManager[AsyncIterator[bytes]], silence_s: float, waiting: Waiting
    ) -> None:
        super().__init__((), headers=HEADERS, media_type="text/event-stream; charset=utf-8")
        self._stream, self._silence_s, self._waiting = stream, silence_s, waiting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with (
            self._stream as events,
            aclosing(_kept_alive(events, self._silence_s, self._waiting)) as self.body_iterator,
        ):
            await super().__call__(scope, receive, send)


async def _kept_alive(events: AsyncIterator[bytes], silence_s: float, waiting: Waiting) -> AsyncGenerator[bytes, None]:
    coming: asyncio.Future[bytes] | None = None
    try:
        while not waiting.has_ended:
            coming = coming or asyncio.ensure_future(anext(events))
            await waiting.first_of(coming, timeout_s=silence_s)
            if not coming.done():
                yield _SILENCE
                continue
            if coming.cancelled():
                break
            finished, coming = coming, None
            try:
                yield finished.result()
            except StopAsyncIteration:
                return
        yield event(shutting_down().body)
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)

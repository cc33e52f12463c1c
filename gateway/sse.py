"""Server-sent events over a streaming response. Knows their form; does not know what they say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse

from gateway.errors import encoded
from gateway.waiting import Waiting, shutting_down

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"
_SILENCE = b": keep-alive\n\n"


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + encoded(data) + b"\n\n"


def streaming(
    events: AsyncGenerator[bytes, None], headers: dict[str, str], silence_s: float, waiting: Waiting
) -> StreamingResponse:
    """``silence_s``: after so long without an event a comment is sent, which keeps connections of proxies open."""
    kept_alive = _kept_alive(events, silence_s, waiting)
    return StreamingResponse(kept_alive, 200, HEADERS | headers, "text/event-stream; charset=utf-8")


async def _kept_alive(events: AsyncGenerator[bytes, None], silence_s: float, waiting: Waiting) -> AsyncIterator[bytes]:
    coming: asyncio.Task[bytes] | None = None
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
        await events.aclose()

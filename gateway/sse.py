"""Server-sent events over a streaming response. Knows their form; does not know what they say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"
_SILENCE = b": keep-alive\n\n"


def event(data: dict[str, Any]) -> bytes:
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


def streaming(events: AsyncGenerator[bytes, None], headers: dict[str, str], silence_s: float) -> StreamingResponse:
    """``silence_s``: after so long without an event a comment is sent, which keeps connections of proxies open."""
    return StreamingResponse(_kept_alive(events, silence_s), 200, HEADERS | headers, "text/event-stream; charset=utf-8")


async def _kept_alive(events: AsyncGenerator[bytes, None], silence_s: float) -> AsyncIterator[bytes]:
    coming: asyncio.Task[bytes] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait({coming}, timeout=silence_s)
            if not done:
                yield _SILENCE
                continue
            finished, coming = coming, None
            try:
                yield finished.result()
            except StopAsyncIteration:
                return
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        await events.aclose()

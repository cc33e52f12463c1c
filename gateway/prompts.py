"""The responses to several prompts, as one stream. Knows the client; does not know what responses say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from specdec.client import Client, Metadata
from specdec.v1 import generation_pb2

Response = tuple[int, generation_pb2.GenerateResponse]

_BUFFERED = 16
"""Responses that wait for a client that reads slowly; after these the orchestrators wait."""


async def responses(
    client: Client, requests: Sequence[dict[str, Any]], metadata: Metadata, timeout_s: float
) -> AsyncGenerator[Response, None]:
    """The responses to all requests, each with the index of its request. The first one comes after an admission.

    Raises the first SpecdecError, and ValueError if a value does not fit its field. Closing it ends all requests.
    """
    if len(requests) == 1:
        async with aclosing(client.stream(timeout_s, metadata, **requests[0])) as stream:
            async for response in stream:
                yield 0, response
        return
    queue: asyncio.Queue[Response | Exception | None] = asyncio.Queue(_BUFFERED)

    async def one(index: int) -> None:
        try:
            async with aclosing(client.stream(timeout_s, metadata, **requests[index])) as stream:
                async for response in stream:
                    await queue.put((index, response))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(one(index)) for index in range(len(requests))]
    try:
        unfinished = len(tasks)
        while unfinished:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                unfinished -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""Who answers requests: an orchestrator over gRPC, or a gateway over HTTP. Does not know how they were started."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, suppress
from typing import Any, Protocol

import httpx2 as httpx

from bench.harness.runner import Answer, Ask, Request, Run, Window
from specdec.client import Client, Sample
from specdec.core.errors import SpecdecError
from specdec.v1.generation_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Chunk,
    Finish,
    GenerateResponse,
    SpeculationStats,
)


class Endpoint(Protocol):
    def asks(self, **fields: Any) -> Ask:
        """Requests with these fields of GenerateRequest. Raises SpecdecError for a request that is refused."""


class OverGrpc:
    def __init__(self, client: Client, salted: bool = True) -> None:
        """``salted``: False for table models, which cache nothing."""
        self._client, self._salted = client, salted

    def asks(self, **fields: Any) -> Ask:
        def stream(request: Request, index: int) -> AsyncGenerator[GenerateResponse, None]:
            return self._client.stream(
                **request.prompts[index],
                **fields,
                max_tokens=request.max_tokens_of(index),
                temperature=request.temperature,
                seed=request.seed + index,
                cache_salt=request.salt if self._salted else "",
            )

        return _asks(stream)


def _asks(stream: Callable[[Request, int], AsyncGenerator[GenerateResponse, None]]) -> Ask:
    """``stream`` gives the responses to a prompt of the request, by its index."""

    async def ask(request: Request) -> Run:
        streams = (stream(request, index) for index in range(len(request.prompts)))
        return await _in_window(streams, request.window or Window(len(request.prompts), math.inf))

    return ask


class _EnoughTokens(Exception):
    """Of a window."""


async def _in_window(streams: Iterator[AsyncGenerator[GenerateResponse, None]], window: Window) -> Run:
    """Raises SpecdecError."""
    samples: list[Sample] = []
    num_tokens = 0

    async def answer_one_by_one() -> None:
        nonlocal num_tokens
        for stream in streams:
            samples.append(sample := Sample())
            async with aclosing(stream) as responses:
                async for response in responses:
                    if response.HasField("chunk"):
                        sample.add(response.chunk)
                    num_tokens += len(response.chunk.token_ids)
                    if num_tokens >= window.num_tokens:
                        raise _EnoughTokens

    started = time.perf_counter()
    places = [asyncio.create_task(answer_one_by_one()) for _ in range(window.num_live)]
    try:
        ended, _ = await asyncio.wait(places, return_when=asyncio.FIRST_EXCEPTION)
        seconds = time.perf_counter() - started
        for place in ended:
            with suppress(_EnoughTokens):
                place.result()
    finally:
        for place in places:
            place.cancel()
        await asyncio.gather(*places, return_exceptions=True)
    return Run(seconds, [Answer(s.token_ids, s.text, s.finish.speculation, not s.finished) for s in samples])


class OverHttp:
    """``http`` has the gateway's base URL, and the API key if one is needed."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    def asks(self, **fields: Any) -> Ask:
        def stream(request: Request, index: int) -> AsyncGenerator[GenerateResponse, None]:
            path, body = _body(request.prompts[index])
            body |= {**fields, "max_tokens": request.max_tokens_of(index), "temperature": request.temperature}
            body |= {"seed": request.seed + index, "cache_salt": request.salt, "stream": True}
            body |= {"return_token_ids": True, "return_origins": True}
            return self._responses(path, body)

        return _asks(stream)

    async def _responses(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[GenerateResponse, None]:
        position, stats = 0, SpeculationStats()
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    why = (await response.aread()).decode(errors="replace")[:300]
                    raise SpecdecError(f"{self._http.base_url} refuses ({response.status_code}): {why}")
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "choices" not in event:
                        raise SpecdecError(f"{self._http.base_url} fails: {line[:300]}")
                    for choice in event["choices"]:
                        yield GenerateResponse(chunk=_chunk(choice, position, stats))
                        position += len(choice.get("token_ids", ()))
        except httpx.HTTPError as error:
            raise SpecdecError(f"{self._http.base_url} does not answer: {error!r}") from error


def _body(prompt: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if "chat" in prompt:
        return "/v1/chat/completions", {"messages": prompt["chat"]["messages"]}
    return "/v1/completions", {"prompt": prompt["token_ids"]["token_ids"] if "token_ids" in prompt else prompt["text"]}


def _chunk(choice: Mapping[str, Any], position: int, stats: SpeculationStats) -> Chunk:
    """``position``: the number of tokens before; ``stats``: of the answer so far; the chunk's rounds are added."""
    for report in choice.get("specdec", {}).get("rounds", ()):
        stats.num_rounds += 1
        stats.num_draft_tokens += report["num_draft_tokens"]
        stats.num_accepted_tokens += report["num_accepted_tokens"]
    text = choice["delta"].get("content") if "delta" in choice else choice["text"]
    chunk = Chunk(token_ids=choice.get("token_ids", ()), text=text or "", first_position=position)
    if choice["finish_reason"]:
        reason = FINISH_REASON_LENGTH if choice["finish_reason"] == "length" else FINISH_REASON_STOP
        chunk.finish.CopyFrom(Finish(reason=reason, speculation=stats))
    return chunk

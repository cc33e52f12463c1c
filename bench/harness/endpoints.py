"""Who answers requests: an orchestrator over gRPC, or a gateway over HTTP. Does not know how they were started."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, suppress
from typing import Any, Protocol

import httpx2 as httpx

from bench.harness.runner import Answer, Ask, Request, Run, Window
from specdec.client import Client, Sample
from specdec.core.errors import SpecdecError
from specdec.v1.generation_pb2 import GenerateResponse, SpeculationStats


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
    """Knows no windows. ``http`` has the gateway's base URL, and the API key if one is needed."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    def asks(self, **fields: Any) -> Ask:
        async def answer(request: Request, index: int) -> Answer:
            path, body = _body(request.prompts[index])
            body |= {**fields, "max_tokens": request.max_tokens, "temperature": request.temperature}
            body["seed"] = request.seed + index
            body |= {"cache_salt": request.salt, "return_token_ids": True, "return_origins": True}
            try:
                response = await self._http.post(path, json=body)
            except httpx.HTTPError as error:
                raise SpecdecError(f"{self._http.base_url} does not answer: {error!r}") from error
            if response.status_code != 200:
                raise SpecdecError(f"{self._http.base_url} refuses ({response.status_code}): {response.text[:300]}")
            return _answer(response.json())

        async def ask(request: Request) -> Run:
            started = time.perf_counter()
            answers = await asyncio.gather(*(answer(request, index) for index in range(len(request.prompts))))
            return Run(time.perf_counter() - started, answers)

        return ask


def _body(prompt: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if "chat" in prompt:
        return "/v1/chat/completions", {"messages": prompt["chat"]["messages"]}
    return "/v1/completions", {"prompt": prompt["token_ids"]["token_ids"] if "token_ids" in prompt else prompt["text"]}


def _answer(response: Mapping[str, Any]) -> Answer:
    [choice] = response["choices"]
    rounds = choice["specdec"]["rounds"]
    stats = SpeculationStats(
        num_rounds=len(rounds),
        num_draft_tokens=sum(report["num_draft_tokens"] for report in rounds),
        num_accepted_tokens=sum(report["num_accepted_tokens"] for report in rounds),
    )
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return Answer(choice["token_ids"], text or "", stats)

"""Who answers requests: an orchestrator over gRPC, or a gateway over HTTP. Does not know how they were started."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol

import httpx2 as httpx

from bench.harness.runner import Answer, Ask, Request, Run
from specdec.client import Client
from specdec.core.errors import SpecdecError
from specdec.v1.generation_pb2 import SpeculationStats


class Endpoint(Protocol):
    def asks(self, **fields: Any) -> Ask:
        """Requests with these fields of GenerateRequest. Raises SpecdecError for a request that is refused."""


class OverGrpc:
    def __init__(self, client: Client, salted: bool = True) -> None:
        """``salted``: False for table models, which cache nothing."""
        self._client, self._salted = client, salted

    def asks(self, **fields: Any) -> Ask:
        async def answer(prompt: Mapping[str, Any], seed: int, request: Request) -> Answer:
            [sample] = await self._client.generate(
                **prompt,
                **fields,
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                seed=seed,
                cache_salt=request.salt if self._salted else "",
            )
            return Answer(list(sample.token_ids), sample.text, sample.finish.speculation)

        async def ask(request: Request) -> Run:
            return await _timed([answer(prompt, seed, request) for prompt, seed in _seeded(request)])

        return ask


class OverHttp:
    """``http`` has the gateway's base URL, and the API key if one is needed."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    def asks(self, **fields: Any) -> Ask:
        async def answer(prompt: Mapping[str, Any], seed: int, request: Request) -> Answer:
            path, body = _body(prompt)
            body |= {**fields, "max_tokens": request.max_tokens, "temperature": request.temperature, "seed": seed}
            body |= {"cache_salt": request.salt, "return_token_ids": True, "return_origins": True}
            try:
                response = await self._http.post(path, json=body)
            except httpx.HTTPError as error:
                raise SpecdecError(f"{self._http.base_url} does not answer: {error!r}") from error
            if response.status_code != 200:
                raise SpecdecError(f"{self._http.base_url} refuses ({response.status_code}): {response.text[:300]}")
            return _answer(response.json())

        async def ask(request: Request) -> Run:
            return await _timed([answer(prompt, seed, request) for prompt, seed in _seeded(request)])

        return ask


def _seeded(request: Request) -> list[tuple[Mapping[str, Any], int]]:
    return [(prompt, request.seed + index) for index, prompt in enumerate(request.prompts)]


async def _timed(answers: Sequence[Coroutine[Any, Any, Answer]]) -> Run:
    started = time.perf_counter()
    return Run(answers=await asyncio.gather(*answers), seconds=time.perf_counter() - started)


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

"""Requests over gRPC and HTTP, as many at a time as a window has places."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, cast

import httpx2 as httpx
import pytest

from bench.harness.endpoints import OverGrpc, OverHttp
from bench.harness.runner import Request, Window
from specdec.client import Client
from specdec.core.errors import SpecdecError
from specdec.v1.generation_pb2 import Chunk, Finish, GenerateResponse


class FakeClient:
    """Answers with the seed, token by token."""

    def __init__(self) -> None:
        self.live = 0
        self.num_live: list[int] = []

    async def stream(self, seed: int, max_tokens: int, **_: Any) -> AsyncGenerator[GenerateResponse, None]:
        if seed == 9:
            raise SpecdecError("refused")
        self.live += 1
        try:
            for position in range(max_tokens):
                await asyncio.sleep(0)
                self.num_live.append(self.live)
                finish = Finish(reason="FINISH_REASON_LENGTH") if position + 1 == max_tokens else None
                yield GenerateResponse(chunk=Chunk(token_ids=[seed], first_position=position, finish=finish))
        finally:
            self.live -= 1


async def test_a_window_has_so_many_live_requests_until_there_are_enough_tokens() -> None:
    client = FakeClient()
    ask = OverGrpc(cast(Client, client)).asks()
    run = await ask(Request([{}] * 9, 4, 0.0, 0, "", Window(2, 12)))
    assert 12 <= run.num_tokens <= 13
    assert [answer.token_ids[0] for answer in run.answers] == list(range(len(run.answers)))
    assert [len(answer.token_ids) for answer in run.whole] == [2, 4, 4]
    assert (client.live, max(client.num_live)) == (0, 2)


async def test_without_a_window_all_are_asked_at_once_and_an_error_is_raised() -> None:
    client = FakeClient()
    ask = OverGrpc(cast(Client, client)).asks()
    run = await ask(Request([{}] * 3, 4, 0.0, 0, ""))
    assert [answer.token_ids for answer in run.whole] == [[0] * 4, [1] * 4, [2] * 4]
    assert max(client.num_live) == 3
    with pytest.raises(SpecdecError):
        await ask(Request([{}] * 3, 4, 0.0, 7, ""))
    assert client.live == 0


def events(body: dict[str, Any]) -> bytes:
    """A stream of ``max_tokens`` chunks, each with its token, which is the seed, and its round."""
    lines = [": keep-alive"]
    for number in range(body["max_tokens"]):
        rounds = [{"num_draft_tokens": 2, "num_accepted_tokens": 1}]
        reason = "length" if number + 1 == body["max_tokens"] else None
        choice = {"token_ids": [body["seed"]], "text": "a", "finish_reason": reason, "specdec": {"rounds": rounds}}
        lines.append("data: " + json.dumps({"choices": [choice]}))
    return "\n\n".join([*lines, "data: [DONE]", ""]).encode()


def gateway(answer: Any) -> httpx.AsyncClient:
    """``answer``: of the body of a request, the status and the content."""

    def handle(request: httpx.Request) -> httpx.Response:
        status, content = answer(json.loads(request.content))
        return httpx.Response(status, content=content)

    return httpx.AsyncClient(base_url="http://gateway", transport=httpx.MockTransport(handle))


async def test_a_window_over_http_refills_and_cuts_and_whole_answers_have_their_rounds() -> None:
    async with gateway(lambda body: (200, events(body))) as http:
        run = await OverHttp(http).asks()(Request([{"text": "x"}] * 9, 4, 0.0, 0, "", Window(2, 13)))
    assert 13 <= run.num_tokens <= 14
    assert [(len(answer.token_ids), answer.stats.num_rounds) for answer in run.whole] == [(2, 2), (4, 4), (4, 4)]
    assert [answer.token_ids[0] for answer in run.answers] == list(range(len(run.answers)))
    assert (run.answers[1].text, run.answers[1].stats.num_draft_tokens) == ("aaaa", 8)


@pytest.mark.parametrize("answer", [(400, b"no such model"), (200, b'data: {"error": {"message": "lost"}}\n\n')])
async def test_what_a_gateway_refuses_or_cannot_end_is_an_error(answer: tuple[int, bytes]) -> None:
    async with gateway(lambda body: answer) as http:
        with pytest.raises(SpecdecError, match=r"http://gateway (refuses \(400\): no such model|fails: .*lost)"):
            await OverHttp(http).asks()(Request([{"text": "x"}], 4, 0.0, 0, ""))
